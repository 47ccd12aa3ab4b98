"""Detects ranks that wait in NCCL for a rank that never makes the same call.

NCCL's collectives wait on the GPU, where no rank can tell for whom. But the ranks count
the collectives that they have queued: a rank that is idle and has queued fewer than
another one keeps that one waiting.
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
    """The idle ranks that have queued fewer collectives in the group."""


def own_gpus(registry: RankRegistry) -> bool:
    """Whether each rank has a GPU of its own, which NCCL needs."""
    gpus = [info.device_uuid for info in registry.infos]
    return None not in gpus and len(set(gpus)) == len(gpus)


class UnevenNccl:
    """Watches the ranks of one call that others have ended."""

    def __init__(self, registry: RankRegistry) -> None:
        self._registry = registry
        self._look_at = 0.0
        self._since: dict[int, tuple[ProgressSnapshot, Wait, float]] = {}

    def look(self, busy: Collection[int], idle: Collection[int]) -> list[Wait]:
        """The busy ranks that wait in vain. Call it repeatedly.

        Args:
            busy: The ranks that have not ended the call.
            idle: The living ranks that run nothing.
        """
        now = time.monotonic()
        if now < self._look_at or not busy or not idle:
            return []
        self._look_at = now + LOOK_S
        if not own_gpus(self._registry):
            return []
        waits = _uneven(self._registry.ask(endpoints.NCCL_CALLS), busy, idle)
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


def _uneven(
    queued: Mapping[int, Mapping[str, NcclTotal] | None],
    busy: Collection[int],
    idle: Collection[int],
) -> list[Wait]:
    """The busy ranks that have queued more in a group than an idle member of it."""
    found = []
    for rank in sorted(busy):
        for group, total in (queued.get(rank) or {}).items():
            missing = frozenset(
                other
                for other in idle
                if (queued.get(other) or {}).get(group, total).number < total.number
            )
            if missing:
                found.append(Wait(rank, group, missing))
                break
    return found
