"""Detects ranks that wait in NCCL for a rank that makes the same call late or never.

NCCL's collectives and messages wait on the GPU, where no rank can tell for whom. But
the ranks count what they have queued: a rank that has queued fewer collectives than
another one, or fewer messages between the two, keeps that one waiting. If it is idle,
it never makes the call.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nbdist.clusters.rank_registry import RankRegistry
from nbdist.ipc import endpoints
from nbdist.wire import NcclTotal, ProgressSnapshot

__all__ = ["UnevenNccl", "Wait", "own_gpus"]

LOOK_S = 0.5
"""Seconds between two looks at the counts."""
STEADY_S = 2.0
"""Seconds at one instruction after which a rank counts as waiting for its GPU."""


@dataclass(frozen=True)
class Wait:
    """A rank that waits in NCCL in vain."""

    rank: int
    group: str
    """The name of the process group."""
    missing: frozenset[int]
    """The ranks that have queued less in the group. They are idle, unless
    the group's time-out has passed."""
    late_s: float = 0.0
    """The group's time-out in seconds, if it has passed."""


def own_gpus(registry: RankRegistry) -> bool:
    """Whether each rank has a GPU of its own, which NCCL needs."""
    gpus = [info.device_uuid for info in registry.infos]
    return None not in gpus and len(set(gpus)) == len(gpus)


class UnevenNccl:
    """Watches the ranks of one call."""

    def __init__(self, registry: RankRegistry) -> None:
        self._registry = registry
        self._look_at = 0.0
        self._since: dict[int, tuple[ProgressSnapshot, Wait, float]] = {}

    def look(self, busy: Collection[int], idle: Collection[int]) -> list[Wait]:
        """The busy ranks that wait in vain, or too long. Call it repeatedly.

        Args:
            busy: The ranks that have not ended the call.
            idle: The living ranks that run nothing.
        """
        now = time.monotonic()
        if now < self._look_at or not busy:
            return []
        self._look_at = now + LOOK_S
        if not own_gpus(self._registry):
            return []
        queued = self._registry.ask(endpoints.NCCL_CALLS)
        if late := _late(queued, busy):
            return late
        waits = _uneven(queued, busy, idle)
        ranks = [wait.rank for wait in waits]
        snapshots = self._registry.ask(endpoints.PROGRESS, ranks=ranks) if ranks else {}
        before, self._since = self._since, {}
        found = []
        for wait in waits:
            snapshot = snapshots[wait.rank]
            if snapshot is None:
                continue
            seen = snapshot, wait, now
            if wait.rank in before and before[wait.rank][:2] == seen[:2]:
                seen = before[wait.rank]
            self._since[wait.rank] = seen
            if now >= seen[2] + STEADY_S:
                found.append(wait)
        return found


def _late(
    queued: Mapping[int, Mapping[str, NcclTotal] | None], busy: Collection[int]
) -> list[Wait]:
    """The busy ranks that have waited for longer than the time-out of a group."""
    found = []
    for rank in sorted(busy):
        for group, total in (queued.get(rank) or {}).items():
            if total.late_s:
                missing = _behind(queued, queued.keys(), group, rank)
                found.append(Wait(rank, group, missing, total.late_s))
                break
    return found


def _uneven(
    queued: Mapping[int, Mapping[str, NcclTotal] | None],
    busy: Collection[int],
    idle: Collection[int],
) -> list[Wait]:
    """The busy ranks that have queued more in a group than an idle member of it."""
    found = []
    for rank in sorted(busy):
        for group in queued.get(rank) or {}:
            if missing := _behind(queued, idle, group, rank):
                found.append(Wait(rank, group, missing))
                break
    return found


def _behind(
    queued: Mapping[int, Mapping[str, NcclTotal] | None],
    others: Collection[int],
    group: str,
    rank: int,
) -> frozenset[int]:
    """The other ranks that have not queued all that a rank waits for in a group."""
    total = (queued[rank] or {})[group]
    return frozenset(
        other
        for other in others
        if (theirs := (queued.get(other) or {}).get(group)) is not None
        and total.exceeds(rank, theirs, other)
    )
