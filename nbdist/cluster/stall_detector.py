"""Telling ranks that wait for each other from ranks that are merely slow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from nbdist.cluster.call import Run
from nbdist.cluster.rank_registry import Roster
from nbdist.ipc import endpoints
from nbdist.wire import Standing, format_ranks

__all__ = ["Standstill", "describe"]

NOTICE_AFTER_S = 10.0
LOOK_S = 2.0


class Seen(NamedTuple):
    """Where a rank was last seen to do something new."""

    standing: Standing | None
    """None where it does not answer."""
    since: float
    """On the monotonic clock."""


class Standstill:
    """Watches the ranks of one run, and says where they are once none gets on.

    A rank gets on when it prints, ends, calls the next collective, or is seen at
    another instruction. It only looks; the run goes on waiting.
    """

    def __init__(self, roster: Roster, run: Run) -> None:
        self._roster, self._run = roster, run
        self._seen: dict[int, Seen] = {}
        self._look_at = time.monotonic() + LOOK_S
        self._shown = False

    def look(self) -> None:
        """Called now and then by who waits for the run."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        ranks = [info.rank for info in self._run.unfinished]
        standings = self._roster.ask(endpoints.STANDING, ranks=ranks)
        self._seen = {
            rank: self._update(rank, standing, now)
            for rank, standing in standings.items()
        }
        newest = max([self._run.last_event, *(s.since for s in self._seen.values())])
        stands = now - newest >= NOTICE_AFTER_S
        if stands or self._shown:
            self._run.notice(describe(self._seen, now) if stands else "")
        self._shown = stands

    def _update(self, rank: int, standing: Standing | None, now: float) -> Seen:
        if standing is not None:
            self._roster.last_places[rank] = standing.place, now
        before = self._seen.get(rank)
        if before is not None and before.standing == standing:
            return before
        return Seen(standing, now)


def describe(seen: Mapping[int, Seen], now: float) -> str:
    """Where each rank is, for how long, and whom the others wait for."""
    lines = [
        f"rank {rank} for {now - each.since:.0f} s: {_place(each.standing)}"
        for rank, each in seen.items()
    ]
    return "\n".join([_verdict(seen), *lines])


def _place(standing: Standing | None) -> str:
    return "does not answer" if standing is None else standing.place


def _verdict(seen: Mapping[int, Seen]) -> str:
    awaited = {
        rank
        for rank, each in seen.items()
        if each.standing is None or each.standing.call is None
    }
    if awaited == seen.keys():
        return "no rank waits for another, and none gets on"
    if awaited:
        return f"the others wait for rank {format_ranks(awaited)}"
    if _have_met(seen):
        return "all ranks have come to the same call, and wait for their GPUs"
    return (
        "deadlock: each rank waits for another, and none will come. Interrupt the cell"
    )


def _have_met(seen: Mapping[int, Seen]) -> bool:
    """Whether all are in one collective of GPU tensors: then nobody is missing."""
    calls = [
        each.standing.call
        for each in seen.values()
        if each.standing is not None and each.standing.call is not None
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
