"""Transports over MPI: ring algorithms, and MPI's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from mpi4py import MPI
from torch import Tensor

from nbdist.collectives.reduction import (
    REDUCE_OPS,
    accumulation_dtype,
    combine,
    finish,
)
from nbdist.collectives.sync.mpi_buffers import moved, reduced
from nbdist.collectives.sync.wait import Check, complete
from nbdist.collectives.transports.base import Transport
from nbdist.collectives.transports.ring import RingStep, chunk_bounds, ring_steps

__all__ = [
    "DirectTransport",
    "MpiTransport",
    "RingTransport",
]

_TAG = 3
RING_FROM_BYTES = 1 << 16
"""Bytes from which the bandwidth matters more than the number of messages."""
_NATIVE_FLOATS = frozenset({"sum", "mean", "product"})
"""Reduce-ops of floats that MPI computes as torch does. MPI's min and max lose NaN."""
_NATIVE_INTEGERS = frozenset({torch.int32, torch.int64})
"""Integers that MPI reduces as torch does. Open MPI's sums of shorter integers saturate
on some processors, instead of wrapping."""


class RingTransport(Transport):
    """Ring algorithms over MPI's point-to-point messages.

    In an all-reduce of n elements each rank sends 2(N-1) messages of at most ceil(n/N)
    elements. float16 and bfloat16 are sent as float32 until they are summed.
    """

    description: ClassVar[str] = "MPI messages in a ring"

    def __init__(self, comm: MPI.Comm, check: Check) -> None:
        self._comm = comm
        self._check = check
        self._steps = ring_steps(comm.size, comm.rank)
        self.sent_messages = 0
        """The number of messages sent, for tests and benchmarks."""
        self.sent_elements = 0

    def all_reduce_flat(self, tensor: Tensor, op: str) -> None:
        wide = accumulation_dtype(tensor.dtype)
        work = tensor.to(wide)  # the tensor itself, except for a half type
        chunks = self._cut(work)
        done = self._reduce_around(chunks, op)
        finish(op, done, self._comm.size)
        if work is not tensor:
            tensor.copy_(work)
        self._gather_around(self._cut(tensor))

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        work = tensor.clone()
        self.all_reduce_flat(work, op)
        if self._comm.rank == root:
            tensor.copy_(work)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str) -> None:
        wide = accumulation_dtype(output.dtype)
        # The ring leaves chunk r+1 on rank r. Shifted by one, that is rank r's own.
        chunks = [piece.to(wide, copy=True) for piece in [*inputs[-1:], *inputs[:-1]]]
        done = self._reduce_around(chunks, op)
        finish(op, done, self._comm.size)
        output.copy_(done)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        outputs[self._comm.rank].copy_(tensor)
        # The ring's all-gather starts with chunk r+1 on rank r: shift by one.
        self._gather_around([*outputs[-1:], *outputs[:-1]])

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Pass the tensor from rank to rank in N pieces."""
        position = (self._comm.rank - root) % self._comm.size
        right = (self._comm.rank + 1) % self._comm.size
        left = (self._comm.rank - 1) % self._comm.size
        sends = []
        for piece in self._cut(tensor):
            if position > 0:
                self._wait([self._receive(piece, left)], tensor)
            if position < self._comm.size - 1:
                sends.append(self._send(piece, right))
        self._wait(sends, tensor)

    def gather(
        self, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int
    ) -> None:
        if outputs is None:
            self._wait([self._send(tensor, root)], tensor)
        else:
            outputs[root].copy_(tensor)
            self._wait(list(self._receive_from_others(outputs)), outputs)

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int
    ) -> None:
        if inputs is None:
            self._wait([self._receive(tensor, root)], tensor)
        else:
            tensor.copy_(inputs[root])
            self._wait(list(self._send_to_others(inputs)), inputs)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], longest: int
    ) -> None:
        rank = self._comm.rank
        receives = list(self._receive_from_others(outputs))
        outputs[rank].copy_(inputs[rank])
        self._wait([*receives, *self._send_to_others(inputs)], outputs, inputs)

    def close(self) -> None:
        pass

    def _cut(self, tensor: Tensor) -> list[Tensor]:
        bounds = chunk_bounds(tensor.numel(), self._comm.size)
        return [tensor[start:stop] for start, stop in bounds]

    def _reduce_around(self, chunks: Sequence[Tensor], op: str) -> Tensor:
        """Overwrite `chunks`; return the chunk that this rank has reduced."""
        incoming = torch.empty_like(max(chunks, key=len))
        for step in self._steps[: self._comm.size - 1]:
            mine = chunks[step.receive_chunk]
            other = incoming[: len(mine)]
            self._swap(step, chunks[step.send_chunk], other)
            combine(op, other, mine, out=mine)
        return chunks[(self._comm.rank + 1) % self._comm.size]

    def _gather_around(self, chunks: Sequence[Tensor]) -> None:
        for step in self._steps[self._comm.size - 1 :]:
            self._swap(step, chunks[step.send_chunk], chunks[step.receive_chunk])

    def _swap(self, step: RingStep, outgoing: Tensor, incoming: Tensor) -> None:
        receive = self._receive(incoming, step.receive_from)
        send = self._send(outgoing, step.send_to)
        self._wait([receive, send], incoming, outgoing)

    def _receive(self, tensor: Tensor, peer: int) -> MPI.Request:
        return self._comm.Irecv(moved(tensor), peer, _TAG)

    def _send(self, tensor: Tensor, peer: int) -> MPI.Request:
        self.sent_messages += 1
        self.sent_elements += tensor.numel()
        return self._comm.Isend(moved(tensor), peer, _TAG)

    def _send_to_others(self, tensors: Sequence[Tensor]) -> Iterator[MPI.Request]:
        for peer, tensor in enumerate(tensors):
            if peer != self._comm.rank:
                yield self._send(tensor, peer)

    def _receive_from_others(self, tensors: Sequence[Tensor]) -> Iterator[MPI.Request]:
        for peer, tensor in enumerate(tensors):
            if peer != self._comm.rank:
                yield self._receive(tensor, peer)

    def _wait(self, requests: list[MPI.Request], *buffers: object) -> None:
        complete(requests, self._check, *buffers)


class MpiTransport(RingTransport):
    """MPI's collectives if they compute the same result as torch, else the ring.

    Large tensors are also reduced in the ring. Among fewer than four ranks, Open MPI's
    non-blocking all-reduce sends all of a tensor to one rank and then back, which takes
    each direction of a link in turn. The ring sends halves in both at once.
    """

    description: ClassVar[str] = "MPI"

    def all_reduce_flat(self, tensor: Tensor, op: str) -> None:
        wide = accumulation_dtype(tensor.dtype)
        size = tensor.numel() * wide.itemsize
        if size >= RING_FROM_BYTES or not _is_native(op, wide):
            super().all_reduce_flat(tensor, op)
            return
        work = tensor.to(wide)
        mpi_op = REDUCE_OPS[op].mpi
        self._wait([self._comm.Iallreduce(MPI.IN_PLACE, reduced(work), mpi_op)], work)
        finish(op, work, self._comm.size)
        if work is not tensor:
            tensor.copy_(work)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._wait([self._comm.Ibcast(moved(tensor), root)], tensor)


def _is_native(op: str, dtype: torch.dtype) -> bool:
    """Whether MPI's reduction computes the same result as torch's."""
    if dtype.is_floating_point or dtype.is_complex:
        return op in _NATIVE_FLOATS
    return dtype in _NATIVE_INTEGERS


class DirectTransport(RingTransport):
    """The ring over a CUDA-aware MPI, for CUDA tensors. The GPU computes the reduction.

    Only point-to-point messages are used, because Open MPI's non-blocking reductions
    do not accept device memory.
    """

    description: ClassVar[str] = "CUDA-aware MPI"

    def __init__(
        self, comm: MPI.Comm, check: Check, settle: Callable[[], None]
    ) -> None:
        """Make a transport.

        Args:
            comm: a communicator over the group's ranks.
            check: called while waiting for messages; ends the wait by raising.
            settle: waits for the work queued on the current stream. It is called before
                each message, because MPI ignores streams and accesses memory at once.
        """
        super().__init__(comm, check)
        self._settle = settle

    def _receive(self, tensor: Tensor, peer: int) -> MPI.Request:
        self._settle()  # queued work may still use this memory
        return super()._receive(tensor, peer)

    def _send(self, tensor: Tensor, peer: int) -> MPI.Request:
        self._settle()
        return super()._send(tensor, peer)
