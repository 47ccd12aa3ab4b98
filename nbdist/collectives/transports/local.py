"""The transport of a group with one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from nbdist.collectives.transports.base import Transport

__all__ = ["LocalTransport"]


class LocalTransport(Transport):
    """Copies within the process. A reduction of one tensor changes nothing."""

    description: ClassVar[str] = "none (a world of one)"
    is_capturable: ClassVar[bool] = True

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        pass

    def all_reduce_flat(self, tensor: Tensor, op: str) -> None:
        pass

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        pass

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str) -> None:
        output.copy_(inputs[0])

    def broadcast(self, tensor: Tensor, root: int) -> None:
        pass

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        outputs[0].copy_(tensor)

    def gather(
        self, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int
    ) -> None:
        assert outputs is not None  # the only rank is the root
        outputs[0].copy_(tensor)

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int
    ) -> None:
        assert inputs is not None  # the only rank is the root
        tensor.copy_(inputs[0])

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], longest: int
    ) -> None:
        outputs[0].copy_(inputs[0])

    def close(self) -> None:
        pass
