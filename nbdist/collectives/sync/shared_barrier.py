"""A barrier in shared memory, with a semaphore for each ordered pair of ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from nbdist.collectives.sync import semaphore
from nbdist.collectives.sync.barrier import RECORD_BYTES, Barrier
from nbdist.collectives.sync.semaphore_barrier import (
    PythonSemaphoreBarrier,
    SemaphoreBarrier,
    closing_word,
    lacks_a_rank,
)
from nbdist.collectives.sync.wait import Check
from nbdist.errors import CollectiveAborted

__all__ = ["SharedBarrier"]

_LINE = 64


class SharedBarrier(Barrier):
    """The barrier of ranks on one host. It takes a microsecond or two.

    Each rank posts to each other rank and waits for each of them. No rank can be two
    steps ahead of another, so two sets of fingerprints and slots are enough. The set of
    step s can be used again after step s+1.
    """

    @staticmethod
    def bytes_needed(size: int) -> int:
        """Bytes of shared memory for `size` ranks."""
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
        """Use zeroed memory. Each rank calls `prepare` next.

        Args:
            memory: at least `bytes_needed(size)` bytes, shared.
            rank: this process's rank.
            size: number of ranks.
            spins: checks before this rank yields its core; 0 if ranks share cores.
            on_late: called once in each wait that is longer than `NAP_S`.
            compiled: the compiled barrier over the same memory, if there is one.
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

        def address(source: int, target: int) -> int:
            return start + fingerprints_end + (target * size + source) * pitch

        self._inbound = [address(peer, rank) for peer in self._peers]
        self._outbound = [address(rank, peer) for peer in self._peers]
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
        """The semaphore barrier. The parity of its `step` is the set in use."""
        self._closed = memory[:_LINE].cast("q")
        records = fingerprints_end + size * size * pitch
        self._records = [
            memory[records + i * RECORD_BYTES :][:RECORD_BYTES] for i in range(2 * size)
        ]

    def prepare(self) -> None:
        """Initialise this rank's semaphores. Call it on all ranks before `arrive`."""
        for address in self._inbound:
            semaphore.initialise(address)

    def arrive(self, fingerprint: int, check: Check) -> bool:
        agreed = self.semaphores.arrive(fingerprint)
        if agreed is None:
            agreed = self.wait(check, self.semaphores.resume)
        return agreed

    def pass_through(self, check: Check) -> None:
        """Wait for all ranks without comparing fingerprints."""
        self.arrive(0, check)

    def wait(self, check: Check, resume: Callable[[], bool | None]) -> bool:
        """Wait for ranks that are late.

        Args:
            check: ends the wait by raising.
            resume: continues the wait; returns None while a rank is late.
        """
        self._waiting = True
        self._explain(check)
        self._on_late()
        while (agreed := resume()) is None:
            self._explain(check)
        self._waiting = False
        return agreed

    def _explain(self, check: Check) -> None:
        """Raise if this rank was aborted, or if another rank has left in this step."""
        check()
        word = self._closed[0]
        if lacks_a_rank(word, self.size, self.semaphores.step):
            left = (word - 1) % self.size
            reason = _text(self._records[left])
            raise CollectiveAborted(f"rank {left} of the group left it: {reason}")

    def exchange(self, record: bytes, check: Check) -> list[bytes]:
        self._records[self.rank][:] = record.ljust(RECORD_BYTES, b"\0")
        self.pass_through(check)
        found = [bytes(each) for each in self._records[: len(self._peers) + 1]]
        self.pass_through(check)  # all ranks have read the records
        return found

    def missing(self) -> list[int]:
        if not self._waiting:
            return []
        posted = [semaphore.is_posted(address) for address in self._inbound]
        first = self.semaphores.waiting_for  # read last: another thread may advance it
        late = zip(self._peers[first:], posted[first:], strict=True)
        return [peer for peer, has_arrived in late if not has_arrived]

    def has_met(self) -> bool:
        return self._waiting and not self.missing()

    def wake(self) -> None:
        self.semaphores.stopped = True
        for address in self._inbound:
            semaphore.post(address)

    def leave(self, reason: str) -> None:
        if self._closed[0]:
            return  # the other ranks show the reason of the first rank that leaves
        text = reason.encode()[:RECORD_BYTES]
        self._records[self.rank][:] = text.ljust(RECORD_BYTES, b"\0")
        self._closed[0] = closing_word(self.rank, self.size, self.semaphores.step)
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
