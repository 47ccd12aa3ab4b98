"""Detects that no rank of a call makes progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from nbdist.clusters.call import Call
from nbdist.clusters.rank_registry import RankRegistry
from nbdist.ipc import endpoints
from nbdist.wire import ProgressSnapshot, format_ranks

__all__ = ["StallDetector", "describe"]

NOTICE_AFTER_S = 10.0
LOOK_S = 2.0


class Seen(NamedTuple):
    """The last position of a rank, and the time since which it is there."""

    snapshot: ProgressSnapshot | None
    """None if the rank does not answer."""
    since: float
    """Time on the monotonic clock."""


class StallDetector:
    """Watches the ranks of one call, and describes their positions in a stall.

    A rank makes progress when it prints, ends, calls another collective, or is seen at
    another instruction. The call stalls when no rank makes progress for 10 seconds. The
    detector only reports a stall: the call continues to wait.
    """

    def __init__(self, registry: RankRegistry, call: Call) -> None:
        self._registry, self._call = registry, call
        self._seen: dict[int, Seen] = {}
        self._look_at = time.monotonic() + LOOK_S
        self._shown = False
        self.quiet_s = 0.0
        """Seconds in which no rank had made progress at the last check."""

    def look(self) -> None:
        """Check the ranks if the last check is 2 seconds ago. Call it repeatedly."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        ranks = [info.rank for info in self._call.unfinished]
        snapshots = self._registry.ask(endpoints.PROGRESS, ranks=ranks)
        self._seen = {
            rank: self._update(rank, snapshot, now)
            for rank, snapshot in snapshots.items()
        }
        newest = max([self._call.last_event, *(s.since for s in self._seen.values())])
        self.quiet_s = now - newest
        stalled = self.quiet_s >= NOTICE_AFTER_S
        if stalled or self._shown:
            self._call.notice(describe(self._seen, now) if stalled else "")
        self._shown = stalled

    @property
    def is_outside_collectives(self) -> bool:
        """Whether the call stalls, and no rank is in one of our collectives."""
        return self._shown and all(
            each.snapshot is not None and each.snapshot.call is None
            for each in self._seen.values()
        )

    def _update(self, rank: int, snapshot: ProgressSnapshot | None, now: float) -> Seen:
        if snapshot is not None:
            self._registry.last_locations[rank] = snapshot.location, now
        before = self._seen.get(rank)
        if before is not None and before.snapshot == snapshot:
            return before
        return Seen(snapshot, now)


def describe(seen: Mapping[int, Seen], now: float) -> str:
    """Each rank's location, its seconds there, and the ranks for which others wait."""
    lines = [
        f"rank {rank} for {now - each.since:.0f} s: {_location(each.snapshot)}"
        for rank, each in seen.items()
    ]
    return "\n".join([_verdict(seen), *lines])


def _location(snapshot: ProgressSnapshot | None) -> str:
    return "does not answer" if snapshot is None else snapshot.location


def _verdict(seen: Mapping[int, Seen]) -> str:
    awaited = {
        rank
        for rank, each in seen.items()
        if each.snapshot is None or each.snapshot.call is None
    }
    if awaited == seen.keys():
        return "no rank waits for another, and none makes progress"
    if awaited:
        return f"the others wait for rank {format_ranks(awaited)}"
    if _have_met(seen):
        return "all ranks are in the same call, and wait for their GPUs"
    return (
        "deadlock: each rank waits for another. Interrupt the cell: it does not end "
        "otherwise"
    )


def _have_met(seen: Mapping[int, Seen]) -> bool:
    """Whether all ranks are in one collective of GPU tensors."""
    calls = [
        each.snapshot.call
        for each in seen.values()
        if each.snapshot is not None and each.snapshot.call is not None
    ]
    what = {
        (call.sequence, call.operation, call.device, call.members) for call in calls
    }
    first = calls[0]
    return (
        len(what) == 1
        and first.device == "cuda"
        and first.sequence > 0
        and set(first.members) == {call.rank for call in calls}
    )
