"""Horovod's reduce-ops, in terms of those of nbdist.collectives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from nbdist.errors import UsageError

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Scaling",
    "Sum",
    "chosen_op",
    "scale",
]


class ReduceOp(Enum):
    """A reduction over the ranks. The value is the name in `nbdist.collectives`."""

    AVERAGE = "mean"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def chosen_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The op of a call that may have Horovod's older argument `average`.

    Raises:
        UsageError: Both arguments are given, or `op` is not one of Horovod's.
    """
    if average is not None:
        if op is not None:
            raise UsageError(f"op={op} and average={average}: pass only op")
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op={op!r}: expected hvd.Average, Sum, Min, Max, Product or "
                         "Adasum")  # fmt: skip
    return op


@dataclass(frozen=True)
class Scaling:
    """A reduce-op, and factors before and after it."""

    op: ReduceOp
    before: float = 1.0
    """The factor of each rank's tensor."""
    after: float = 1.0
    """The factor of the result."""

    def transport_op(self, dtype: torch.dtype) -> str:
        """The transport's op. An average of integers is a sum, divided by `finish`."""
        if self.op is Average and not (dtype.is_floating_point or dtype.is_complex):
            return "sum"
        return self.op.value

    def finish(self, total: Tensor, size: int) -> None:
        """Turn the transport's result for `size` ranks into the op's, in place."""
        if self.transport_op(total.dtype) != self.op.value:
            total.copy_(total.div(size, rounding_mode="trunc"))
        if self.after != 1.0:
            scale(total, self.after)


def scale(tensor: Tensor, factor: float) -> Tensor:
    """Multiply in place. Integers are multiplied in float64, as in Horovod."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.mul_(factor)
    return tensor.copy_(tensor.double() * factor)
