"""The interface of transports, which move data between ranks."""

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
    serves, and equal in length and dtype on all ranks, except in `all_to_all`.
    `all_reduce` takes any strided tensor. All ranks call the same method, with checked
    arguments. A list has one tensor for each rank, in rank order. It is None on ranks
    where the operation does not use it.
    """

    description: ClassVar[str]
    """Shown by %dist_status."""
    has_barrier: ClassVar[bool] = False
    """Whether each operation passes the group's barrier before it touches data."""

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Reduce a strided tensor in place, to the same bits on all ranks."""
        flat = Flat(tensor)
        self.all_reduce_flat(flat.tensor, op)
        flat.write_back()

    @abstractmethod
    def all_reduce_flat(self, tensor: Tensor, op: str) -> None:
        """`all_reduce` of a contiguous, one-dimensional tensor."""

    @abstractmethod
    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        """Reduce into the root's tensor. The other tensors are kept."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str) -> None:
        """Reduce `inputs[r]` of all ranks into rank r's output. Inputs are kept."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the root's tensor into all others."""

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

        Each pair of ranks has a length; `longest` is the greatest of all pairs.
        """

    def finish(self, check: Check) -> None:  # noqa: B027 - most queue nothing
        """Wait for queued work, so that `close` does not interrupt it.

        Args:
            check: called while waiting; ends the wait by raising.
        """

    def abort(self) -> None:  # noqa: B027 - most call the group's check
        """Release this process's wait. Any thread may call."""

    @abstractmethod
    def close(self) -> None:
        """Free what the transport holds. Safe to call twice."""
