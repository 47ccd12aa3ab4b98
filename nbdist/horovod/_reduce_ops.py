"""Horovod's reduction operations, and what each means for our collectives."""

from __future__ import annotations

from enum import Enum

import torch

from nbdist.errors import UsageError

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "chosen_op",
    "neutral",
    "transport_op",
]


class ReduceOp(Enum):
    """How tensors of several ranks become one."""

    AVERAGE = "mean"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def chosen_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The op that a caller means, who may use the older `average` in its place.

    Raises:
        UsageError: both are given, or it is none of ours.
    """
    if average is not None:
        if op is not None:
            raise UsageError(f"op={op} and average={average}: give op alone")
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op={op!r}: expected hvd.Average, Sum, Min, Max, Product or "
                         "Adasum")  # fmt: skip
    return op


def transport_op(op: ReduceOp, dtype: torch.dtype) -> str:
    """What the transports are to do: integers have no mean, and are divided after."""
    if op is Average and not (dtype.is_floating_point or dtype.is_complex):
        return "sum"
    return op.value


def neutral(op: str, dtype: torch.dtype) -> float | int:
    """What changes no result: the part of a rank that has joined."""
    if op == "product":
        return 1
    if op not in ("min", "max"):
        return 0
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    bounds = torch.iinfo(dtype)
    return bounds.max if op == "min" else bounds.min
