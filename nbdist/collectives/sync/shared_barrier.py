"""A barrier in shared memory: a semaphore for each pair of ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from nbdist.collectives.sync import semaphore
from nbdist.collectives.sync.barrier import RECORD_BYTES, Barrier
from nbdist.collectives.sync.semaphore_barrier import (
    PythonSemaphoreBarrier,
    SemaphoreBarrier,
)
from nbdist.collectives.sync.wait import Check
from nbdist.errors import CollectiveAborted

__all__ = ["SharedBarrier"]

_LINE = 64


class SharedBarrier(Barrier):
    """Ranks of one host meet here in a microsecond or two.

    Each rank posts to every other and waits for every other. Nobody can be two steps
    ahead of anybody, so that fingerprints, and slots of data, need two places each:
    those of step s are free again once step s+1 was passed.
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
        compiled: SemaphoreBarrier | None,
    ) -> None:
        """Map zeroed memory. Each rank calls `prepare` next.

        Args:
            memory: at least `bytes_needed(size)` bytes, shared.
            rank: this process's.
            size: number of ranks.
            spins: how often to look before giving up the core; 0 where ranks share it.
            on_late: called once in each wait that takes longer than a nap.
            compiled: the compiled barrier over the same memory, where there is one.
        """
        self.rank = rank
        self.size = size
        self.compiled = compiled
        self._peers = [peer for peer in range(size) if peer != rank]
        self._on_late = on_late
        self._waiting = False
        self._map(memory, spins)

    def _map(self, memory: memoryview, spins: int) -> None:
        size, rank = self.size, self.rank
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        fingerprints_end = _LINE * (2 * size + 1)
        pitch = semaphore.SEMAPHORE_BYTES

        def place(source: int, target: int) -> int:
            return start + fingerprints_end + (target * size + source) * pitch

        self._inbound = [place(peer, rank) for peer in self._peers]
        self._outbound = [place(rank, peer) for peer in self._peers]
        self.semaphores = self.compiled or PythonSemaphoreBarrier(
            self._inbound,
            self._outbound,
            [
                start + _LINE * (1 + parity * size + each)
                for parity in range(2)
                for each in (rank, *self._peers)
            ],
            start,
            spins,
        )
        """This rank's way through; `step` tells which of two places is in use."""
        self._closed = memory[:_LINE].cast("q")
        records = fingerprints_end + size * size * pitch
        self._records = [
            memory[records + i * RECORD_BYTES :][:RECORD_BYTES] for i in range(2 * size)
        ]

    def prepare(self) -> None:
        """Make this rank's own semaphores; all ranks must have, before any arrives."""
        for address in self._inbound:
            semaphore.initialise(address)

    def arrive(self, fingerprint: int, check: Check) -> bool:
        agreed = self.semaphores.cross(fingerprint)
        if agreed is None:
            agreed = self.wait(check, self.semaphores.resume)
        return agreed

    def pass_through(self, check: Check) -> None:
        """Wait for all ranks, without comparing anything."""
        self.arrive(0, check)

    def wait(self, check: Check, resume: Callable[[], bool | None]) -> bool:
        """Wait for ranks that are late.

        Args:
            check: ends the wait by raising.
            resume: waits a while more; None while a rank is late.
        """
        self._waiting = True
        self._explain(check)
        self._on_late()
        while (agreed := resume()) is None:
            self._explain(check)
        self._waiting = False
        return agreed

    def _explain(self, check: Check) -> None:
        """Raise if this rank was aborted or another one has left."""
        check()
        left = self._closed[0]
        if left:
            reason = _text(self._records[left - 1])
            raise CollectiveAborted(f"rank {left - 1} of the group left it: {reason}")

    def exchange(self, record: bytes, check: Check) -> list[bytes]:
        self._records[self.rank][:] = record.ljust(RECORD_BYTES, b"\0")
        self.pass_through(check)
        found = [bytes(each) for each in self._records[: len(self._peers) + 1]]
        self.pass_through(check)  # all have read: the place is free again
        return found

    def missing(self) -> list[int]:
        if not self._waiting:
            return []
        first = self.semaphores.waiting_for
        late = zip(self._peers[first:], self._inbound[first:], strict=True)
        return [peer for peer, address in late if semaphore.try_wait(address) != 0]

    def wake(self) -> None:
        self.semaphores.stopped = True
        for address in self._inbound:
            semaphore.post(address)

    def leave(self, reason: str) -> None:
        if self._closed[0]:
            return  # the first who left is the reason for the others
        text = reason.encode()[:RECORD_BYTES]
        self._records[self.rank][:] = text.ljust(RECORD_BYTES, b"\0")
        self._closed[0] = self.rank + 1
        for address in self._outbound:
            semaphore.post(address)

    def leave_note(self, note: str) -> None:
        text = note.encode()[:RECORD_BYTES]
        self._records[self.size + self.rank][:] = text.ljust(RECORD_BYTES, b"\0")

    def notes(self) -> list[str]:
        return [_text(record) for record in self._records[self.size :]]

    def close(self) -> None:
        pass


def _text(record: memoryview) -> str:
    return bytes(record).rstrip(b"\0").decode(errors="replace")
