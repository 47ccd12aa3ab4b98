"""Crossing a gate in shared memory: post to every other rank, wait for each of them.

There are two of them: the compiled one, and the same in Python for machines that had no
compiler. They use the same memory in the same way.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

from . import _semaphore as semaphore

__all__ = ["Crossing", "PythonCrossing", "find_compiled", "make_crossing"]

_EDITION = 1
"""Of the compiled part: a checkout that was changed may still have an older one."""
_YIELDS = 100
"""Some 50 microseconds: waking a sleeper takes as long as that."""
_NAP_S = 0.05
"""Longest sleep between two looks at why a wait should end; a wake ends it sooner."""
_SPINS_IN_C = 20
"""Looks of the compiled one in the time of one look in Python."""


class Crossing(Protocol):
    """One rank's way through a gate, again and again."""

    step: int
    """How often it was crossed."""
    waiting_for: int
    """The first peer, as an index into `inbound`, that was not there yet."""
    stopped: bool
    """Set to end the crossing under way, and every later one, with None."""

    def cross(self, word: int) -> bool | None:
        """Arrive with a word, and wait a while for the others.

        Returns:
            Whether all brought the same word; None when somebody is late, has left
            the gate, or when this crossing was stopped: look which, and `resume`.
        """

    def resume(self) -> bool | None:
        """Wait a while more."""


def find_compiled() -> ModuleType | None:
    """The compiled part, where the installation has one that fits this code."""
    try:
        found = importlib.import_module("nbdist.collectives._native")
    except ImportError:
        return None
    return found if getattr(found, "EDITION", 0) == _EDITION else None


def make_crossing(
    inbound: Sequence[int],
    outbound: Sequence[int],
    words: Sequence[int],
    closed: int,
    spins: int,
    compiled: ModuleType | None,
) -> Crossing:
    """A rank's crossing. Every argument but the last two holds addresses.

    Args:
        inbound: the semaphores this rank waits for, one for each peer.
        outbound: those it posts to, in the same order.
        words: places of 8 bytes for even steps, then for odd ones; in each half this
            rank's first, then the peers'.
        closed: 8 bytes that are 0 until a rank leaves for good.
        spins: how often to look before giving up the core; 0 where ranks share it.
        compiled: what `find_compiled` found; None takes the one in Python.
    """
    if compiled is None:
        return PythonCrossing(inbound, outbound, words, closed, spins)
    made: Crossing = compiled.Crossing(
        inbound, outbound, words, closed, spins * _SPINS_IN_C, _YIELDS, _NAP_S
    )
    return made


class PythonCrossing:
    """The crossing where nothing was compiled."""

    def __init__(
        self,
        inbound: Sequence[int],
        outbound: Sequence[int],
        words: Sequence[int],
        closed: int,
        spins: int,
    ) -> None:
        self.step = 0
        self.waiting_for = 0
        self.stopped = False
        self._inbound, self._outbound = inbound, outbound
        places = [ctypes.c_int64.from_address(address) for address in words]
        half = len(words) // 2
        self._words = (places[:half], places[half:])
        self._closed = ctypes.c_int64.from_address(closed)
        self._spins = spins

    def cross(self, word: int) -> bool | None:
        self._words[self.step & 1][0].value = word
        for address in self._outbound:
            semaphore.post(address)
        self.waiting_for = 0
        return self.resume()

    def resume(self) -> bool | None:
        while self.waiting_for < len(self._inbound):
            if not self._take(self._inbound[self.waiting_for]):
                return None
            self.waiting_for += 1
        if self.stopped or self._closed.value:
            return None
        mine, *theirs = self._words[self.step & 1]
        self.step += 1
        return all([other.value == mine.value for other in theirs])  # noqa: C419 - faster

    def _take(self, address: int) -> bool:
        try_wait = semaphore.try_wait
        for _ in range(self._spins + 1):
            if try_wait(address) == 0:
                return True
        for _ in range(_YIELDS):
            os.sched_yield()  # to the rank we wait for, where ranks share cores
            if try_wait(address) == 0:
                return True
        return semaphore.wait(address, _NAP_S)
