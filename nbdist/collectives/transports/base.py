"""The interface of transports, which move and reduce data between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from nbdist.collectives.flat import Flat
from nbdist.collectives.sync.wait import Check

__all__ = ["Transport"]


class Transport(ABC):
    """Moves and reduces tensors between the ranks of one group.

    Every tensor is contiguous and one-dimensional, on a device that the transport
    serves, and of equal length and dtype on all ranks. Lengths may differ in
    `all_to_all`, and `all_reduce` accepts any strided tensor. Every rank must call the
    same method. The operation has checked the arguments. A list has one tensor for each
    rank, in rank order, and is None on ranks that do not use it.
    """

    description: ClassVar[str]
    """The transport's name in `%dist_status`."""
    ends_together: ClassVar[bool] = False
    """Whether all ranks must have finished before a rank closes the transport."""
    has_barrier: ClassVar[bool] = False
    """Whether each operation passes the group's barrier before it changes data."""
    is_capturable: ClassVar[bool] = False
    """Whether a CUDA graph can capture the operations: the host takes no part."""

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Reduce a strided tensor in place, to the same bits on all ranks."""
        flat = Flat(tensor, writes=True)
        self.all_reduce_flat(flat.tensor, op)
        flat.write_back()

    @abstractmethod
    def all_reduce_flat(self, tensor: Tensor, op: str) -> None:
        """`all_reduce` of a contiguous, one-dimensional tensor."""

    @abstractmethod
    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        """Reduce into the root's tensor. The other tensors do not change."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str) -> None:
        """Reduce `inputs[r]` of all ranks into rank r's output, not in the inputs."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the root's tensor into the other ranks' tensors."""

    @abstractmethod
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Copy rank r's tensor into `outputs[r]`."""

    @abstractmethod
    def gather(
        self, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int
    ) -> None:
        """Copy rank r's tensor into the root's `outputs[r]`."""

    @abstractmethod
    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int
    ) -> None:
        """Copy the root's `inputs[r]` into rank r's tensor."""

    @abstractmethod
    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], longest: int
    ) -> None:
        """Copy rank r's `inputs[own rank]` into `outputs[r]`.

        Each pair of ranks has its own length, in elements; `longest` is the greatest.
        """

    def finish(self, check: Check) -> None:  # noqa: B027 - most queue nothing
        """Wait for the work queued on GPUs, so that `close` does not interrupt it.

        Args:
            check: called while waiting; ends the wait by raising.
        """

    @property
    def is_finished(self) -> bool:
        """Whether the work queued on GPUs is done."""
        return True

    def abort(self) -> None:  # noqa: B027 - most waits call the group's check
        """Release this process's wait. Any thread may call."""

    @abstractmethod
    def close(self) -> None:
        """Free the transport's memory and connections. Safe to call twice."""
