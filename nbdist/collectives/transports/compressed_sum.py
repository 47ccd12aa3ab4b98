"""Sums float32 tensors of several hosts, which send them encoded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nbdist.collectives.compression import Codec
from nbdist.collectives.sync.mpi_buffers import moved
from nbdist.collectives.sync.wait import Check, complete
from nbdist.collectives.transports.ring import chunk_bounds

__all__ = ["CompressedSum"]

_TAG = 4
SMALLEST = 4096
"""Elements from which a tensor is compressed. Less is bound by the latency."""
MOST_TENSORS = 1024
"""The most tensors whose errors are kept."""


class _Residuals(NamedTuple):
    """The errors of a tensor's last encodings, which its next sum corrects."""

    storage: StorageWeakRef
    sent: Tensor
    """For each element, what the encoding of this rank's value lacked."""
    result: Tensor
    """For each element of this rank's chunk, what the encoded sum lacked."""


class CompressedSum:
    """An all-reduce by "sum" in which each value is encoded twice.

    Each rank sends every other rank the encoded chunk that the other one sums. Each
    rank sums its chunk in float32, and sends the encoded sum to all. All ranks decode
    the same bytes, so that their results have the same bits. A rank sends 2(N-1)/N of
    the tensor, as in a ring, but each value is encoded twice instead of N times.

    With feedback, what an encoding has lost is kept and added in the next call for the
    same tensor, as Seide et al. do in "1-bit stochastic gradient descent", Interspeech
    2014. A tensor is the same if it has the same memory.

    Args:
        comm: a communicator over the ranks.
        codec: encodes the values.
        check: called while waiting; ends the wait by raising.
    """

    def __init__(self, comm: MPI.Comm, codec: Codec, check: Check) -> None:
        self._comm, self._codec, self._check = comm, codec, check
        self._residuals: OrderedDict[tuple[int, int, int], _Residuals] = OrderedDict()
        self.sent_bytes = 0
        """The number of bytes sent, for tests and benchmarks."""

    def takes(self, tensor: Tensor, op: str) -> bool:
        """Whether this can reduce a tensor. The answer is the same on all ranks."""
        return op == "sum" and tensor.dtype == torch.float32 and len(tensor) >= SMALLEST

    def all_reduce(self, tensor: Tensor, origin: Tensor) -> None:
        """Sum a tensor over the ranks, in place. Every rank must call.

        Args:
            tensor: contiguous, one-dimensional, float32, in host memory.
            origin: the tensor whose memory tells which errors to correct.
        """
        bounds = chunk_bounds(len(tensor), self._comm.size)
        chunks = [tensor[begin:end] for begin, end in bounds]
        own = chunks[self._comm.rank]
        errors = None
        if self._codec.has_feedback:
            errors = self._errors_of(origin, tensor, own)
            tensor.add_(errors.sent)
        outgoing = {peer: self._encoded(chunks[peer]) for peer in self._others()}
        if errors is not None:
            errors.sent.copy_(tensor)
            errors_of = [errors.sent[begin:end] for begin, end in bounds]
            self._subtract(errors_of, outgoing)
            _set_finite(errors.sent)
        self._sum_into(own, outgoing)
        if errors is not None:
            own.add_(errors.result)
        mine = self._encoded(own)
        if errors is not None:
            errors.result.copy_(own)
        for chunk, encoded in zip(chunks, self._gathered(mine, chunks), strict=True):
            self._codec.decode(encoded, chunk)
        if errors is not None:
            _set_finite(errors.result.sub_(own))

    def _encoded(self, values: Tensor) -> Tensor:
        encoded = self._room_for(values)
        self._codec.encode(values, encoded)
        return encoded

    def _subtract(self, chunks: Sequence[Tensor], sent: Mapping[int, Tensor]) -> None:
        """Subtract what was sent of each chunk. Nothing is lost of this rank's own."""
        for peer, chunk in enumerate(chunks):
            if peer in sent:
                decoded = torch.empty_like(chunk)
                self._codec.decode(sent[peer], decoded)
                chunk.sub_(decoded)
            else:
                chunk.zero_()

    def _sum_into(self, own: Tensor, outgoing: Mapping[int, Tensor]) -> None:
        """Exchange the encoded chunks, and add the others' to this rank's chunk."""
        incoming = {peer: self._room_for(own) for peer in self._others()}
        self._swap(incoming, outgoing)
        decoded = torch.empty_like(own)
        for encoded in incoming.values():  # in rank order
            self._codec.decode(encoded, decoded)
            own.add_(decoded)

    def _gathered(self, mine: Tensor, chunks: Sequence[Tensor]) -> list[Tensor]:
        """The encoded sums of all ranks."""
        incoming = {peer: self._room_for(chunks[peer]) for peer in self._others()}
        self._swap(incoming, dict.fromkeys(incoming, mine))
        return [incoming.get(peer, mine) for peer in range(self._comm.size)]

    def _room_for(self, values: Tensor) -> Tensor:
        """Memory for values, encoded."""
        size = self._codec.size(len(values))
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def _swap(
        self, incoming: Mapping[int, Tensor], outgoing: Mapping[int, Tensor]
    ) -> None:
        requests = [
            self._comm.Irecv(moved(each), peer, _TAG) for peer, each in incoming.items()
        ]
        for peer, each in outgoing.items():
            self.sent_bytes += len(each)
            requests.append(self._comm.Isend(moved(each), peer, _TAG))
        complete(requests, self._check, incoming, outgoing)

    def _others(self) -> list[int]:
        return [peer for peer in range(self._comm.size) if peer != self._comm.rank]

    def _errors_of(self, origin: Tensor, tensor: Tensor, own: Tensor) -> _Residuals:
        """The errors that are kept for a tensor; zeros for a tensor that is new."""
        storage = StorageWeakRef(origin.untyped_storage())
        key = int(storage.cdata), int(origin.storage_offset()), len(tensor)
        found = self._residuals.pop(key, None)
        if found is None or found.storage.expired():
            found = _Residuals(storage, torch.zeros_like(tensor), torch.zeros_like(own))
        self._residuals[key] = found
        self._forget()
        return found

    def _forget(self) -> None:
        """Forget the tensors that no longer exist, and the oldest of too many."""
        ended = [k for k, each in self._residuals.items() if each.storage.expired()]
        for key in ended:
            del self._residuals[key]
        while len(self._residuals) > MOST_TENSORS:
            self._residuals.popitem(last=False)


def _set_finite(errors: Tensor) -> None:
    """Set errors that are not finite to 0: a NaN must not spoil later calls."""
    errors.masked_fill_(~errors.isfinite(), 0.0)
