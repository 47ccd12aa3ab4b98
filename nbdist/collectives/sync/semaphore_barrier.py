"""A semaphore barrier: a rank posts to each other rank, and waits for each of them.

There are two implementations, in C and in Python for machines without a compiler. Both
use the same memory in the same way.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Protocol

from nbdist.collectives.sync import semaphore

__all__ = [
    "NAP_S",
    "YIELDS",
    "PythonSemaphoreBarrier",
    "SemaphoreBarrier",
    "closing_word",
    "lacks_a_rank",
]

YIELDS = 100
"""Yields before a rank sleeps. They take about 50 us, as long as waking a rank does."""
NAP_S = 0.05
"""Longest sleep between two checks of a wait, in seconds. `wake` ends it sooner."""


def closing_word(rank: int, size: int, passed: int) -> int:
    """The value that a leaving rank stores for the other ranks.

    The value is 0 while no rank has left.

    Args:
        rank: The leaving rank.
        size: The number of ranks.
        passed: The number of times that the rank has passed the barrier.
    """
    return 1 + rank + size * passed


def lacks_a_rank(word: int, size: int, step: int) -> bool:
    """Whether the rank that wrote `word` has left without passing `step`.

    If it has passed `step`, all ranks have arrived at `step`, and none needs it.
    """
    return word != 0 and (word - 1) // size <= step


class SemaphoreBarrier(Protocol):
    """One rank's part of the barrier."""

    step: int
    """The number of times that this rank has passed."""
    waiting_for: int
    """The first peer that has not arrived, as an index into `inbound`."""
    stopped: bool
    """True makes this wait and every later one return None."""

    def arrive(self, fingerprint: int) -> bool | None:
        """Arrive with a fingerprint, and wait a short time for the other ranks.

        Returns:
            Whether all fingerprints are equal; None if a rank is late or has left, or
            if this barrier was stopped. The caller finds out which, and calls `resume`.
        """

    def resume(self) -> bool | None:
        """Continue to wait. Returns the same as `arrive`."""


class PythonSemaphoreBarrier:
    """The barrier in Python."""

    def __init__(
        self,
        inbound: Sequence[int],
        outbound: Sequence[int],
        fingerprints: Sequence[int],
        closed: int,
        spins: int,
    ) -> None:
        self.step = 0
        self.waiting_for = 0
        self.stopped = False
        self._inbound, self._outbound = inbound, outbound
        places = [ctypes.c_int64.from_address(address) for address in fingerprints]
        half = len(fingerprints) // 2
        self._fingerprints = (places[:half], places[half:])
        self._size = len(inbound) + 1
        self._closed = ctypes.c_int64.from_address(closed)
        self._spins = spins

    def arrive(self, fingerprint: int) -> bool | None:
        self._fingerprints[self.step & 1][0].value = fingerprint
        for address in self._outbound:
            semaphore.post(address)
        self.waiting_for = 0
        return self.resume()

    def resume(self) -> bool | None:
        while self.waiting_for < len(self._inbound):
            if not self._take(self._inbound[self.waiting_for]):
                return None
            self.waiting_for += 1
        if self.stopped or lacks_a_rank(self._closed.value, self._size, self.step):
            return None
        mine, *theirs = self._fingerprints[self.step & 1]
        self.step += 1
        return all([other.value == mine.value for other in theirs])  # noqa: C419 - faster

    def _take(self, address: int) -> bool:
        try_wait = semaphore.try_wait
        for _ in range(self._spins + 1):
            if try_wait(address) == 0:
                return True
        for _ in range(YIELDS):
            os.sched_yield()  # lets the awaited rank run, if ranks share cores
            if try_wait(address) == 0:
                return True
        return semaphore.wait(address, NAP_S)
