"""allreduce: a tensor, or several at once, reduced over all ranks of a process set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nbdist.collectives import Group
from nbdist.collectives._arguments import Flat, resolve
from nbdist.collectives._reduction import parse_op
from nbdist.errors import UsageError
from nbdist.training.adasum import adasum

from ._autograd import apply
from ._compression import Compression, Compressor
from ._coordinator import Coordinator
from ._handles import begin, complete
from ._process_sets import ProcessSet, coordinator_of, global_process_set
from ._reduce_ops import Adasum, ReduceOp, chosen_op
from ._request import Request, StandIn, copied, named
from ._scaling import Scaling, finish, scale

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "reduction",
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


def reduction(
    coordinator: Coordinator,
    tensors: Sequence[Tensor],
    scaling: Scaling,
    operation: str,
    name: str | None,
) -> Request:
    """The request to reduce tensors in place."""
    group, on_leave = coordinator.group, coordinator.abort
    for tensor in tensors:
        resolve(tensor, group)
        if scaling.op is Adasum:
            _check_adasum(tensor)
        else:
            parse_op(scaling.transport_op(tensor.dtype), tensor.dtype)
    for tensor in tensors:
        scale(tensor.detach(), scaling.before)
    first = tensors[0]
    shape = tuple(first.shape) if len(tensors) == 1 else _all_sizes(tensors)
    kind = named(operation, name, scaling.op.value, None, first, shape)
    key = coordinator.name(operation, name)
    if scaling.op is Adasum:
        return Request(key, kind, _adasum_body(group, tensors, scaling), on_leave)
    flats = _fused(tensors)
    transport = group.transport(first.device.type)
    ops = [scaling.transport_op(flat.tensor.dtype) for flat, _ in flats]

    def body() -> None:
        for (flat, _), op in zip(flats, ops, strict=True):
            transport.all_reduce(flat.tensor, op)
        for flat, parts in flats:
            finish(flat.tensor, scaling, group.size)
            flat.write_back()
            for part, fused in parts:
                part.copy_(fused)

    stand_in = None
    if len(set(ops)) == 1:
        stand_in = StandIn.of(ops[0], [flat.tensor for flat, _ in flats])
    meets = transport.meets and len(flats) == 1
    return Request(key, kind, body, on_leave, meets=meets, stand_in=stand_in)


def _all_sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def _fused(
    tensors: Sequence[Tensor],
) -> list[tuple[Flat, list[tuple[Tensor, Tensor]]]]:
    """Tensors laid out as few flat ones, with what is to be copied back from them."""
    if len(tensors) == 1:
        return [(Flat(tensors[0]), [])]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    fused = []
    for alike in by_dtype.values():
        joined = torch.cat([tensor.reshape(-1) for tensor in alike])
        parts = joined.split([tensor.numel() for tensor in alike])
        views = [part.view(each.shape) for part, each in zip(parts, alike, strict=True)]
        fused.append((Flat(joined), list(zip(alike, views, strict=True))))
    return fused


def _check_adasum(tensor: Tensor) -> None:
    if not tensor.dtype.is_floating_point:
        raise UsageError(f"Adasum of {tensor.dtype}: expected a floating dtype")


def _adasum_body(
    group: Group, tensors: Sequence[Tensor], scaling: Scaling
) -> Callable[[], None]:
    flats = [Flat(tensor) for tensor in tensors]

    def body() -> None:
        adasum([flat.tensor for flat in flats], group)
        for flat in flats:
            scale(flat.tensor, scaling.after)
            flat.write_back()

    return body
