"""Reduce-ops: their names, where they are defined, how tensors are combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nbdist.errors import UnsupportedCollective, UsageError

__all__ = [
    "ReduceOp",
    "accumulation_dtype",
    "combine",
    "finish",
    "parse_op",
    "reduce_rows",
]

ReduceOp = str | dist.ReduceOp
"""A name ("sum", "mean", "product", "min", "max", "band", "bor", "bxor") or c10d's."""

_FROM_C10D = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
_NAMES = frozenset({*_FROM_C10D.values(), "mean"})
_BITWISE = frozenset({"band", "bor", "bxor"})
_HALF = frozenset({torch.float16, torch.bfloat16})
_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_DTYPES = frozenset(
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
_accepted: set[tuple[str, torch.dtype]] = set()


def parse_op(op: ReduceOp, dtype: torch.dtype) -> str:
    """The reduce-op's name, once it is known to be defined for `dtype`.

    A sum of bools is "or" and a product "and", as adding and multiplying bool tensors
    is in torch. c10d's AVG, "avg" here, is also defined for integers, as NCCL has it:
    rounded towards zero. Libraries that know NCCL count on that.

    Raises:
        UsageError: there is no such op.
        UnsupportedCollective: it is not defined for this dtype.
    """
    if (op, dtype) in _accepted:
        return op  # type: ignore[return-value]
    name = op if isinstance(op, str) else _c10d_name(op)
    if name not in _NAMES:
        raise UsageError(f"reduce-op {op!r}: expected one of {sorted(_NAMES)}")
    if name == "avg" and (dtype.is_floating_point or dtype.is_complex):
        name = "mean"
    _check_defined(name, dtype)
    _accepted.add((name, dtype))
    return name


def _c10d_name(op: dist.ReduceOp) -> str:
    # An op is the enum itself, or a ReduceOp object wrapped around it.
    label = str(getattr(op, "op", op)).rsplit(".", 1)[-1]
    return _FROM_C10D.get(label, label)


def _check_defined(name: str, dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise UnsupportedCollective(f"{name} of {dtype}: this dtype cannot be reduced")
    inexact = dtype.is_floating_point or dtype.is_complex
    if (name == "mean" and not inexact) or (name == "avg" and dtype is torch.bool):
        expected = "a floating or complex dtype; use sum, or convert the tensor first"
    elif name in ("min", "max") and dtype.is_complex:
        expected = "a real dtype, for complex numbers have no order"
    elif name in _BITWISE and inexact:
        expected = "an integer or bool dtype"
    else:
        return
    raise UnsupportedCollective(f"{name} of {dtype}: expected {expected}")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for the half types, whose own sums would lose digits; else `dtype`."""
    return torch.float32 if dtype in _HALF else dtype


def combine(op: str, first: Tensor, second: Tensor, out: Tensor) -> Tensor:
    """`out = first (op) second`, elementwise; `out` may be either operand."""
    return _COMBINE[op](first, second, out=out)


def finish(op: str, total: Tensor, size: int) -> None:
    """Turn a sum over `size` ranks into the result, in place: only means have work."""
    if op == "mean":
        total.div_(size)
    elif op == "avg":
        total.div_(size, rounding_mode="trunc")


def reduce_rows(op: str, rows: Sequence[Tensor], out: Tensor) -> None:
    """Reduce equal tensors in the order given into `out`.

    Every rank that calls this with the same rows gets the same bits. Half types are
    accumulated in float32 and rounded once.

    Args:
        op: a parsed reduce-op.
        rows: two tensors or more, same shape, dtype and device.
        out: receives the result; may be one of `rows` only if it is the first or
            the second.
    """
    if out.dtype in _HALF:
        out.copy_(_reduce_wide(op, rows))
    else:
        step = _COMBINE[op]
        step(rows[0], rows[1], out=out)
        for row in rows[2:]:
            step(out, row, out=out)
        finish(op, out, len(rows))


def _reduce_wide(op: str, rows: Sequence[Tensor]) -> Tensor:
    total = rows[0].float()
    for row in rows[1:]:
        _COMBINE[op](total, row, out=total)
    finish(op, total, len(rows))
    return total
