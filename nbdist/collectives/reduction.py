"""Reduce-ops: their implementations, their dtypes, and the reduction of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from nbdist.errors import UnsupportedCollective, UsageError

__all__ = [
    "REDUCE_DTYPES",
    "REDUCE_OPS",
    "ReduceOp",
    "accumulation_dtype",
    "c10d_name",
    "combine",
    "finish",
    "neutral_element",
    "parse_op",
    "reduce_rows",
]

ReduceOp = str | dist.ReduceOp
"""A name: "sum", "mean", "product", "min", "max", "band", "bor" or "bxor"; or c10d's
ReduceOp."""


class Definition(NamedTuple):
    """The implementations of a reduce-op in each library."""

    combine: Callable[..., Tensor]
    """torch's function of two operands. A mean is a sum, which `finish` divides."""
    mpi: MPI.Op
    nccl: Any = None
    """c10d's op for NCCL; None if NCCL does not have the op."""


REDUCE_OPS: dict[str, Definition] = {
    "sum": Definition(torch.add, MPI.SUM, dist.ReduceOp.SUM),
    "mean": Definition(torch.add, MPI.SUM, dist.ReduceOp.AVG),
    "avg": Definition(torch.add, MPI.SUM, dist.ReduceOp.AVG),
    "product": Definition(torch.mul, MPI.PROD, dist.ReduceOp.PRODUCT),
    "min": Definition(torch.minimum, MPI.MIN, dist.ReduceOp.MIN),
    "max": Definition(torch.maximum, MPI.MAX, dist.ReduceOp.MAX),
    "band": Definition(torch.bitwise_and, MPI.BAND),
    "bor": Definition(torch.bitwise_or, MPI.BOR),
    "bxor": Definition(torch.bitwise_xor, MPI.BXOR),
}
"""Every reduce-op. "avg" is c10d's AVG, which is also defined for integers."""
_FROM_C10D = {
    getattr(dist.ReduceOp, name.upper()): name for name in REDUCE_OPS if name != "mean"
}
_BITWISE = frozenset({"band", "bor", "bxor"})
_HALF = frozenset({torch.float16, torch.bfloat16})
REDUCE_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    }
)
"""The dtypes of tensors that can be reduced."""
_accepted: set[tuple[str, torch.dtype]] = set()


def parse_op(op: ReduceOp, dtype: torch.dtype) -> str:
    """Check that a reduce-op is defined for `dtype`, and return its name.

    A sum of bools is "or" and a product "and", as in torch. c10d's AVG, "avg" here, is
    also defined for integers and rounds towards zero, as in NCCL.

    Raises:
        UsageError: `op` is not one of the reduce-ops.
        UnsupportedCollective: The op is not defined for this dtype.
    """
    if (op, dtype) in _accepted:
        return op  # type: ignore[return-value]
    name = op if isinstance(op, str) else c10d_name(op)
    if name not in REDUCE_OPS:
        raise UsageError(f"reduce-op {op!r}: expected one of {sorted(REDUCE_OPS)}")
    if name == "avg" and (dtype.is_floating_point or dtype.is_complex):
        name = "mean"
    _check_defined(name, dtype)
    _accepted.add((name, dtype))
    return name


def c10d_name(op: dist.ReduceOp) -> str | None:
    """The name of one of c10d's ops; None for an op that nbdist does not have."""
    return _FROM_C10D.get(getattr(op, "op", op))  # the enum, or an object around it


def _check_defined(name: str, dtype: torch.dtype) -> None:
    if dtype not in REDUCE_DTYPES:
        raise UnsupportedCollective(f"{name} of {dtype}: this dtype cannot be reduced")
    inexact = dtype.is_floating_point or dtype.is_complex
    if (name == "mean" and not inexact) or (name == "avg" and dtype is torch.bool):
        expected = "a floating or complex dtype; use sum, or convert the tensor first"
    elif name in ("min", "max") and dtype.is_complex:
        expected = "a real dtype, because complex numbers have no order"
    elif name in _BITWISE and inexact:
        expected = "an integer or bool dtype"
    else:
        return
    raise UnsupportedCollective(f"{name} of {dtype}: expected {expected}")


def neutral_element(op: str, dtype: torch.dtype) -> float | int:
    """The operand that does not change a result of `op`."""
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


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16 and bfloat16, whose sums would lose digits; else `dtype`."""
    return torch.float32 if dtype in _HALF else dtype


def combine(op: str, first: Tensor, second: Tensor, out: Tensor) -> Tensor:
    """`out = first (op) second`, elementwise. `out` may be one of the operands."""
    return REDUCE_OPS[op].combine(first, second, out=out)


def finish(op: str, total: Tensor, size: int) -> None:
    """Turn the combined operands of `size` ranks into the result, in place.

    A mean is divided by `size`. Other reduce-ops have their result already.
    """
    if op == "mean":
        total.div_(size)
    elif op == "avg":
        total.div_(size, rounding_mode="trunc")


def reduce_rows(op: str, rows: Sequence[Tensor], out: Tensor) -> None:
    """Reduce tensors in the given order into `out`.

    The same rows give the same bits on every rank. float16 and bfloat16 are accumulated
    in float32 and rounded once.

    Args:
        op: A name that `parse_op` has returned.
        rows: Two or more tensors of one shape, dtype and device.
        out: The tensor for the result. It may be the first or second of `rows`.
    """
    if out.dtype in _HALF:
        out.copy_(_reduce_wide(op, rows))
    else:
        step = REDUCE_OPS[op].combine
        step(rows[0], rows[1], out=out)
        for row in rows[2:]:
            step(out, row, out=out)
        finish(op, out, len(rows))


def _reduce_wide(op: str, rows: Sequence[Tensor]) -> Tensor:
    total = rows[0].float()
    for row in rows[1:]:
        REDUCE_OPS[op].combine(total, row, out=total)
    finish(op, total, len(rows))
    return total
