"""What elements are multiplied with on their way through a reduction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._reduce_ops import ReduceOp, transport_op

__all__ = ["Scaling", "finish", "scale"]


@dataclass(frozen=True)
class Scaling:
    """A reduce-op, and the factors before and after it."""

    op: ReduceOp
    before: float = 1.0
    after: float = 1.0

    def transport_op(self, dtype: torch.dtype) -> str:
        """What the transport is to do."""
        return transport_op(self.op, dtype)


def scale(tensor: Tensor, factor: float) -> Tensor:
    """Multiply in place; integers as Horovod does, in double precision."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.mul_(factor)
    return tensor.copy_(tensor.double() * factor)


def finish(total: Tensor, scaling: Scaling, size: int) -> None:
    """What is left to do after the transport, in place."""
    if scaling.transport_op(total.dtype) != scaling.op.value:
        total.copy_(total.div(size, rounding_mode="trunc"))
    scale(total, scaling.after)
