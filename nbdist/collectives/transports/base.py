"""The seam: what a way of moving data between ranks must offer."""

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

    Every tensor is contiguous and one-dimensional, on a device this transport serves,
    and equal in length and dtype on all ranks, except in `all_to_all`; `all_reduce`
    takes any strided one. All ranks call the same method; the caller has checked the
    arguments. A list holds one tensor per
    rank, in rank order; on ranks where it has no meaning it is None.
    """

    description: ClassVar[str]
    """In words, for %dist_status."""
    meets: ClassVar[bool] = False
    """Whether each operation passes the barrier by itself, before it touches data."""

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Reduce a strided tensor in place; the same bits on all ranks."""
        flat = Flat(tensor)
        self.all_reduce_flat(flat.tensor, op)
        flat.write_back()

    @abstractmethod
    def all_reduce_flat(self, tensor: Tensor, op: str) -> None:
        """`all_reduce` of a contiguous, one-dimensional tensor."""

    @abstractmethod
    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        """Reduce into root's tensor; the others' stay as they are."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str) -> None:
        """Reduce inputs[r] of all ranks into rank r's output; inputs are kept."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite all tensors with root's."""

    @abstractmethod
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """outputs[r] becomes rank r's tensor."""

    @abstractmethod
    def gather(
        self, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int
    ) -> None:
        """On root, outputs[r] becomes rank r's tensor."""

    @abstractmethod
    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int
    ) -> None:
        """Rank r's tensor becomes root's inputs[r]."""

    @abstractmethod
    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], longest: int
    ) -> None:
        """outputs[r] becomes rank r's inputs[own rank].

        Lengths may differ by pair; `longest` is the greatest of them, on all ranks.
        """

    def finish(self, check: Check) -> None:  # noqa: B027 - most are done by then
        """Wait for what was queued, so that `close` does not cut it off.

        Args:
            check: called meanwhile; ends the wait by raising.
        """

    def abort(self) -> None:  # noqa: B027 - most look at the group's check instead
        """Release what this process waits for. May be called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the transport holds. Safe to call twice."""
