"""allreduce: a tensor, or several at once, reduced over all ranks of a process set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nbdist.errors import UsageError

from ._autograd import apply
from ._compression import Compression, Compressor
from ._handles import begin, complete
from ._process_sets import ProcessSet, coordinator_of, global_process_set
from ._reduce_ops import ReduceOp, chosen_op
from ._reduction import reduction
from ._request import copied
from ._scaling import Scaling

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


# -- one tensor ------------------------------------------------------------------------


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The reduction of a tensor over the ranks. Every rank of the set must call.

    Gradients flow through: the gradient of the result is reduced in the same way.

    Args:
        tensor: Any shape, equal shape and dtype on all ranks; kept.
        average: The old way to say op=Average or op=Sum.
        name: What the other ranks know the call by; default its number.
        compression: What is done to the tensor on its way.
        op: Average (if not given), Sum, Min, Max, Product or Adasum. An average of
            integers is rounded towards zero.
        prescale_factor, postscale_factor: What each tensor is multiplied with before,
            and the result after the reduction.
        process_set: The ranks.

    Returns:
        A tensor of the same shape and dtype, on the same device.

    Raises:
        UsageError: A name that is under way, an unknown op, ranks without `init`.
        UnsupportedCollective: The op is not defined for the dtype.
        CollectiveMismatch: The ranks' tensors or ops differ under this name.
    """
    chosen = chosen_op(op, average)
    scaling = Scaling(chosen, prescale_factor, postscale_factor)
    packed, context = compression.compress(tensor)
    reduced: Tensor = apply(_Allreduce, packed, scaling, name, process_set)
    return compression.decompress(reduced, context)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an `allreduce`; a handle for `synchronize` and `poll`. No gradients."""
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    handle: int = _start(
        begin, [copied(tensor)], False, scaling, name, process_set, _only
    )
    return handle


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce` in place; the tensor itself. No gradients."""
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    reduced: Tensor = _start(
        complete, [tensor], False, scaling, name, process_set, _only
    )
    return reduced


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an `allreduce_`; a handle. The tensor is not to be touched until then."""
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    handle: int = _start(begin, [tensor], False, scaling, name, process_set, _only)
    return handle


# -- several tensors -------------------------------------------------------------------


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors as one call. Every rank of the set must call."""
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    packed = [compression.compress(tensor) for tensor in tensors]
    reduced = apply(
        _GroupedAllreduce, scaling, name, process_set, *(each for each, _ in packed)
    )
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, packed, strict=True)
    ]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin a `grouped_allreduce`; a handle. No gradients."""
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    copies = [copied(tensor) for tensor in tensors]
    handle: int = _start(begin, copies, True, scaling, name, process_set, _all)
    return handle


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`grouped_allreduce` in place; the tensors themselves. No gradients."""
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    reduced: list[Tensor] = _start(
        complete, list(tensors), True, scaling, name, process_set, _all
    )
    return reduced


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin a `grouped_allreduce_`; a handle."""
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    handle: int = _start(begin, list(tensors), True, scaling, name, process_set, _all)
    return handle


# -- gradients -------------------------------------------------------------------------


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        scaling: Scaling,
        name: str | None,
        process_set: ProcessSet,
    ) -> Tensor:
        ctx.scaling, ctx.process_set = scaling, process_set
        reduced: Tensor = _start(
            complete, [copied(tensor)], False, scaling, name, process_set, _only
        )
        return reduced

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = apply(_Allreduce, gradients[0], ctx.scaling, None, ctx.process_set)
        return gradient, None, None, None


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scaling: Scaling,
        name: str | None,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.scaling, ctx.process_set = scaling, process_set
        copies = [copied(tensor) for tensor in tensors]
        return tuple(_start(complete, copies, True, scaling, name, process_set, _all))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back = apply(_GroupedAllreduce, ctx.scaling, None, ctx.process_set, *gradients)
        return None, None, None, *back


# -- the call --------------------------------------------------------------------------


def _only(tensors: list[Tensor]) -> Tensor:
    return tensors[0]


def _all(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


def _start(
    how: Callable[..., Any],
    tensors: list[Tensor],
    grouped: bool,
    scaling: Scaling,
    name: str | None,
    process_set: ProcessSet,
    pick: Callable[[list[Tensor]], Any],
) -> Any:
    """Reduce tensors in place, by `begin` or `complete`."""
    if not tensors:
        raise UsageError("grouped_allreduce of no tensors: give at least one")
    coordinator = coordinator_of(process_set)
    operation = "grouped_allreduce" if grouped else "allreduce"
    request = reduction(coordinator, tensors, scaling, operation, name)
    return how(coordinator, request, lambda: pick(tensors))
