"""Barriers that compare the fingerprints of the ranks' calls."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from mpi4py import MPI

from nbdist.collectives.sync.wait import Check, abandon, are_over, complete

__all__ = ["RECORD_BYTES", "Barrier", "MessageBarrier"]

RECORD_BYTES = 512
"""Size of one rank's pickled record of its call, padded."""
_ARRIVAL_TAG = 1
_RECORD_TAG = 2


class Barrier(ABC):
    """Each rank arrives with a fingerprint, and passes when all ranks have arrived."""

    @abstractmethod
    def arrive(self, fingerprint: int, check: Check) -> bool:
        """Wait for all ranks.

        Args:
            fingerprint: 63 bits that must be equal on all ranks.
            check: called while waiting; ends the wait by raising.

        Returns:
            Whether all fingerprints are equal. The result is the same on all ranks.
        """

    @abstractmethod
    def exchange(self, record: bytes, check: Check) -> list[bytes]:
        """Return every rank's record, in rank order. Every rank must call."""

    @abstractmethod
    def missing(self) -> list[int]:
        """The ranks that have not arrived in the last `arrive`."""

    def has_met(self) -> bool:
        """Whether all ranks have arrived, so that this rank is about to pass.

        Any thread may call. The result is False if the barrier does not know.
        """
        return False

    def leave(self, reason: str) -> None:  # noqa: B027 - optional
        """Release the waiting ranks, because this rank will not arrive."""

    def leave_note(self, note: str) -> None:  # noqa: B027 - optional
        """Set this rank's note, which other ranks' `notes` returns; "" removes it."""

    def notes(self) -> list[str]:
        """Each rank's note, in rank order; [] if notes are not supported."""
        return []

    def wake(self) -> None:  # noqa: B027 - some waits check often
        """Make the waiting thread of this process call its `check` now."""

    @abstractmethod
    def close(self) -> None:
        """Free the barrier's requests. Safe to call twice."""


class MessageBarrier(Barrier):
    """A barrier of MPI messages from each rank to each other rank."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._peers = [rank for rank in range(comm.size) if rank != comm.rank]
        self._mine = np.zeros(1, np.int64)
        self._theirs = np.zeros((comm.size, 1), np.int64)
        sends = [comm.Send_init(self._mine, peer, _ARRIVAL_TAG) for peer in self._peers]
        receives = [
            comm.Recv_init(self._theirs[peer], peer, _ARRIVAL_TAG)
            for peer in self._peers
        ]
        self._requests: list[MPI.Prequest] = [*receives, *sends]

    def arrive(self, fingerprint: int, check: Check) -> bool:
        self._mine[0] = self._theirs[self._comm.rank] = fingerprint
        requests = self._requests
        MPI.Prequest.Startall(requests)
        complete(requests, check, self._mine, self._theirs)
        return bool((self._theirs == fingerprint).all())

    def exchange(self, record: bytes, check: Check) -> list[bytes]:
        mine = np.frombuffer(record.ljust(RECORD_BYTES, b"\0"), np.uint8)
        theirs = np.zeros((self._comm.size, RECORD_BYTES), np.uint8)
        theirs[self._comm.rank] = mine
        requests: list[MPI.Request] = []
        for peer in self._peers:
            requests.append(self._comm.Irecv(theirs[peer], peer, _RECORD_TAG))
            requests.append(self._comm.Isend(mine, peer, _RECORD_TAG))
        complete(requests, check, mine, theirs)
        return [row.tobytes() for row in theirs]

    def missing(self) -> list[int]:
        return [
            peer
            for peer, request in zip(self._peers, self._requests, strict=False)
            if not are_over([request])
        ]

    def close(self) -> None:
        if are_over(self._requests):
            for request in self._requests:
                request.Free()
        else:
            abandon(self._requests, self._mine, self._theirs)
        self._requests = []
