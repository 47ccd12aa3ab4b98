"""Collectives of ranks on several hosts, with several ranks on a host."""

from __future__ import annotations

from typing import ClassVar

from mpi4py import MPI
from torch import Tensor

from nbdist.collectives.reduction import accumulation_dtype, finish
from nbdist.collectives.sync.wait import Check
from nbdist.collectives.transports.base import Transport
from nbdist.collectives.transports.compressed_sum import CompressedSum
from nbdist.collectives.transports.mpi import MpiTransport

__all__ = ["HierarchicalTransport"]

_MEANS = frozenset({"mean", "avg"})
"""Reduce-ops that are a sum, which is divided at the end."""


class HierarchicalTransport(MpiTransport):
    """Reduces within each host, then between the hosts, and then copies the result.

    One rank of each host, the *leader*, sends and receives between hosts. A tensor
    therefore crosses the network as often as with one rank on each host. float16 and
    bfloat16 are sent as float32, and rounded once. The other operations are those of
    MPI.

    Args:
        comm: a communicator over all ranks.
        check: called while waiting; ends the wait by raising.
        within: the transport of this rank's host, whose rank 0 is the leader.
        between: the transport of the leaders; None on other ranks.
        compressed: sums tensors of the leaders that it takes; None on other ranks, and
            if values are sent as they are.
    """

    description: ClassVar[str] = "shared memory within hosts, MPI between hosts"

    def __init__(
        self,
        comm: MPI.Comm,
        check: Check,
        within: Transport,
        between: Transport | None,
        compressed: CompressedSum | None = None,
    ) -> None:
        super().__init__(comm, check)
        self._within, self._between, self._compressed = within, between, compressed

    def all_reduce_flat(self, tensor: Tensor, op: str) -> None:
        work = tensor.to(accumulation_dtype(tensor.dtype))
        partial = "sum" if op in _MEANS else op
        self._within.reduce(work, partial, 0)
        if self._between is not None:
            if self._compressed is not None and self._compressed.takes(work, partial):
                self._compressed.all_reduce(work, tensor)
            else:
                self._between.all_reduce_flat(work, partial)
            finish(op, work, self._comm.size)
            if work is not tensor:
                tensor.copy_(work)
        self._within.broadcast(tensor, 0)

    def abort(self) -> None:
        self._within.abort()

    def close(self) -> None:
        self._within.close()
