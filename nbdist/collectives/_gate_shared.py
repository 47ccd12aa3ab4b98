"""A gate in shared memory: a semaphore for each pair of ranks, a word for each rank."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from nbdist.errors import CollectiveAborted

from . import _semaphore as semaphore
from ._gate import RECORD_BYTES, Gate
from ._wait import Check

__all__ = ["SharedGate"]

_LINE = 64
_YIELDS = 100
"""Some 50 microseconds: waking a sleeper takes as long as that."""
_NAP_S = 0.05
"""Longest sleep between two looks at `check`; a wake ends it sooner."""


class SharedGate(Gate):
    """Ranks of one host meet here in a few microseconds.

    Each rank posts to every other and waits for every other. Nobody can be two steps
    ahead of anybody, so that words, and slots of data, need two places each: those of
    step s are free again once step s+1 was passed.
    """

    @staticmethod
    def bytes_needed(size: int) -> int:
        """Of shared memory, for `size` ranks."""
        semaphores = size * size * semaphore.SEMAPHORE_BYTES
        return _LINE * (2 * size + 1) + semaphores + 2 * size * RECORD_BYTES

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        size: int,
        spins: int,
        on_late: Callable[[], None],
    ) -> None:
        """Map the gate; the memory must be zeroed, and each rank calls `prepare` next.

        Args:
            memory: at least `bytes_needed(size)` bytes, shared.
            rank: this process's.
            size: number of ranks.
            spins: how often to look before giving up the core; 0 where ranks share it.
            on_late: called once in each wait that takes longer than a nap.
        """
        self.step = 0
        """Times this gate was passed. Its lowest bit says which place is in use."""
        self.rank = self._rank = rank
        self.size = self._size = size
        self._peers = [peer for peer in range(size) if peer != rank]
        self._spins = spins
        self._on_late = on_late
        self._woken = False
        self._waiting_for = 0
        self._map(memory, size)

    def _map(self, memory: memoryview, size: int) -> None:
        self._closed = memory[:_LINE].cast("q")
        words_end = _LINE * (2 * size + 1)
        words = memory[_LINE:words_end].cast("q")
        line = _LINE // 8
        self._words = [words[: size * line : line], words[size * line :: line]]
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + words_end
        pitch = semaphore.SEMAPHORE_BYTES

        def place(source: int, target: int) -> int:
            return base + (target * size + source) * pitch

        self._inbound = [place(peer, self._rank) for peer in self._peers]
        self._outbound = [place(self._rank, peer) for peer in self._peers]
        start = words_end + size * size * pitch
        self._records = [
            memory[start + i * RECORD_BYTES :][:RECORD_BYTES] for i in range(2 * size)
        ]

    def prepare(self) -> None:
        """Make this rank's own semaphores; all ranks must have, before any arrives."""
        for address in self._inbound:
            semaphore.initialise(address)

    def arrive(self, word: int, check: Check) -> bool:
        words = self._words[self.step & 1]
        words[self._rank] = word
        self.pass_through(check)
        return all([words[peer] == word for peer in self._peers])  # noqa: C419 - faster

    def pass_through(self, check: Check) -> None:
        """Wait for all ranks, without comparing anything."""
        post, try_wait = semaphore.post, semaphore.try_wait
        for address in self._outbound:
            post(address)
        for address in self._inbound:
            if try_wait(address):
                self._take(address, check)
        self.step += 1
        if self._woken or self._closed[0]:
            self._explain(check)

    def _take(self, address: int, check: Check) -> None:
        try_wait = semaphore.try_wait
        for _ in range(self._spins):
            if try_wait(address) == 0:
                return
        for _ in range(_YIELDS):
            os.sched_yield()  # to the rank we wait for, where ranks share cores
            if try_wait(address) == 0:
                return
        self._waiting_for = address
        late = False
        while not semaphore.wait(address, _NAP_S):
            self._explain(check)
            if not late:
                late = True
                self._on_late()

    def _explain(self, check: Check) -> None:
        """Raise if this rank was aborted or another one has left."""
        check()
        left = self._closed[0]
        if left:
            reason = _text(self._records[left - 1])
            raise CollectiveAborted(f"rank {left - 1} of the group left it: {reason}")

    def exchange(self, record: bytes, check: Check) -> list[bytes]:
        self._records[self._rank][:] = record.ljust(RECORD_BYTES, b"\0")
        self.pass_through(check)
        found = [bytes(each) for each in self._records[: len(self._peers) + 1]]
        self.pass_through(check)  # all have read: the place is free again
        return found

    def missing(self) -> list[int]:
        if self._waiting_for not in self._inbound:
            return []
        first = self._inbound.index(self._waiting_for)
        return [
            peer
            for peer, address in zip(
                self._peers[first:], self._inbound[first:], strict=True
            )
            if semaphore.try_wait(address) != 0
        ]

    def wake(self) -> None:
        self._woken = True
        for address in self._inbound:
            semaphore.post(address)

    def leave(self, reason: str) -> None:
        if self._closed[0]:
            return  # the first who left is the reason for the others
        text = reason.encode()[:RECORD_BYTES]
        self._records[self._rank][:] = text.ljust(RECORD_BYTES, b"\0")
        self._closed[0] = self._rank + 1
        for address in self._outbound:
            semaphore.post(address)

    def leave_note(self, note: str) -> None:
        text = note.encode()[:RECORD_BYTES]
        self._records[self._size + self._rank][:] = text.ljust(RECORD_BYTES, b"\0")

    def notes(self) -> list[str]:
        return [_text(record) for record in self._records[self._size :]]

    def close(self) -> None:
        pass


def _text(record: memoryview) -> str:
    return bytes(record).rstrip(b"\0").decode(errors="replace")
