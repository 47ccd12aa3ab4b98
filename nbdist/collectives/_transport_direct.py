"""Device memory given to MPI as it is, where MPI can take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from mpi4py import MPI
from torch import Tensor

from nbdist.collectives._transport_mpi import RingTransport
from nbdist.collectives.sync.wait import Check

__all__ = ["DirectTransport"]


class DirectTransport(RingTransport):
    """The ring over a CUDA-aware MPI; the GPU does the sums.

    Messages alone: MPI's own non-blocking reductions work on the host, and take no
    device memory in Open MPI.
    """

    description: ClassVar[str] = "CUDA-aware MPI"

    def __init__(
        self, comm: MPI.Comm, check: Check, settle: Callable[[], None]
    ) -> None:
        """Make it.

        Args:
            comm: among the group's ranks.
            check: called while waiting for messages; ends the wait by raising.
            settle: returns once what is queued on the current stream is done. MPI knows
                nothing of streams: it reads and writes at once.
        """
        super().__init__(comm, check)
        self._settle = settle

    def _receive(self, tensor: Tensor, peer: int) -> MPI.Request:
        self._settle()  # what is queued may still use this memory
        return super()._receive(tensor, peer)

    def _send(self, tensor: Tensor, peer: int) -> MPI.Request:
        self._settle()
        return super()._send(tensor, peer)
