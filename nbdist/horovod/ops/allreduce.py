"""allreduce: reduces a tensor, or several at once, over the ranks of a process set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nbdist.collectives import Group
from nbdist.collectives.flat import check_writable
from nbdist.collectives.ops.validation import Flat, resolve
from nbdist.collectives.reduction import parse_op
from nbdist.errors import UsageError
from nbdist.horovod.adasum import adasum
from nbdist.horovod.compression import Compression, Compressor, compressed
from nbdist.horovod.coordinator import Coordinator
from nbdist.horovod.handles import begin, complete
from nbdist.horovod.negotiation import Request, copied, named
from nbdist.horovod.process_sets import ProcessSet, coordinator_of, global_process_set
from nbdist.horovod.reduce_ops import Adasum, ReduceOp, Scaling, chosen_op, scale

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
    """Reduce a tensor over the ranks. Every rank of the set must call.

    Gradients flow through: the gradient of the result is reduced in the same way.

    Args:
        tensor: On the CPU or this rank's GPU, of any shape, with equal shape and dtype
            on all ranks; not changed.
        average: Horovod's older argument: True is op=Average, False is op=Sum.
        name: The name that identifies the call on all ranks. Default: the number of the
            call.
        compression: Compresses the tensor before it is sent.
        op: Average (default), Sum, Min, Max, Product or Adasum. An average of integers
            is rounded towards zero.
        prescale_factor: The factor of each tensor before the reduction.
        postscale_factor: The factor of the result.
        process_set: The ranks that take part. Default: all ranks.

    Returns:
        A tensor of the same shape and dtype, on the same device.

    Raises:
        UsageError: A call with this name is under way, the op is unknown, or `init` was
            not called.
        UnsupportedCollective: The op is not defined for the dtype.
        CollectiveMismatch: The ranks' calls with this name have different tensors or
            ops.
    """
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    packed, context = compression.compress(tensor)
    reduced: Tensor = _Allreduce.apply(packed, scaling, name, process_set)
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
    """Start an `allreduce`; returns a handle. No gradients flow through."""
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    handle: int = _start(begin, [copied(tensor)], False, scaling, name, process_set)
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
    """`allreduce` in place; returns the tensor. No gradients flow through."""
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    reduced: Tensor = _start(complete, [tensor], False, scaling, name, process_set)
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
    """Start an `allreduce_`; returns a handle.

    Do not use the tensor before `synchronize(handle)` has returned.
    """
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    handle: int = _start(begin, [tensor], False, scaling, name, process_set)
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
    """`allreduce` of each of several tensors, as one call.

    Every rank of the set must call, with the same number of tensors.
    """
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    reduce = partial(_GroupedAllreduce.apply, scaling, name, process_set)
    return compressed(compression, tensors, reduce)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce`; returns a handle. No gradients flow through."""
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    copies = [copied(tensor) for tensor in tensors]
    handle: int = _start(begin, copies, True, scaling, name, process_set)
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
    """`grouped_allreduce` in place; returns the tensors. No gradients flow through."""
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    reduced: list[Tensor] = _start(
        complete, list(tensors), True, scaling, name, process_set
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
    """Start a `grouped_allreduce_`; returns a handle."""
    scaling = Scaling(chosen_op(op, average), prescale_factor, postscale_factor)
    handle: int = _start(begin, list(tensors), True, scaling, name, process_set)
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
            complete, [copied(tensor)], False, scaling, name, process_set
        )
        return reduced

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = _Allreduce.apply(gradients[0], ctx.scaling, None, ctx.process_set)
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
        return tuple(_start(complete, copies, True, scaling, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back = _GroupedAllreduce.apply(ctx.scaling, None, ctx.process_set, *gradients)
        return None, None, None, *back


# -- the call --------------------------------------------------------------------------


def _start(
    how: Callable[..., Any],
    tensors: list[Tensor],
    grouped: bool,
    scaling: Scaling,
    name: str | None,
    process_set: ProcessSet,
) -> Any:
    """Reduce tensors in place.

    Args:
        how: `begin`, or `complete` to wait for the result.
        grouped: Whether the user has called the grouped operation.
    """
    if not tensors:
        raise UsageError("grouped_allreduce of no tensors: pass at least one")
    coordinator = coordinator_of(process_set)
    operation = "grouped_allreduce" if grouped else "allreduce"
    request = reduction(coordinator, tensors, scaling, operation, name)
    return how(coordinator, request, lambda: tensors if grouped else tensors[0])


def reduction(
    coordinator: Coordinator,
    tensors: Sequence[Tensor],
    scaling: Scaling,
    operation: str,
    name: str | None,
) -> Request:
    """The request to reduce tensors in place.

    Args:
        coordinator: The coordinator of the process set.
        tensors: At least one tensor. Number, shapes and dtypes are equal on all ranks.
        scaling: The op, and the factors before and after it.
        operation, name: The operation and the name, which identify the call on all
            ranks.
    """
    group, on_leave = coordinator.group, coordinator.abort
    for tensor in tensors:
        resolve(tensor, group)
        check_writable(tensor)
        if scaling.op is Adasum:
            _check_adasum(tensor)
        else:
            parse_op(scaling.transport_op(tensor.dtype), tensor.dtype)
    if scaling.before != 1.0:
        for tensor in tensors:
            scale(tensor.detach(), scaling.before)
    first = tensors[0]
    shape = tuple(first.shape) if len(tensors) == 1 else _all_sizes(tensors)
    kind = named(operation, name, scaling.op.value, None, first, shape)
    key = coordinator.name(operation, name)
    if scaling.op is Adasum:
        return Request(key, kind, _adasum_body(group, tensors, scaling), on_leave)
    fused = _fused(tensors, scaling)
    transport = group.transport(first.device)

    def body() -> None:
        for each in fused:
            transport.all_reduce(each.flat.tensor, each.op)
        for each in fused:
            scaling.finish(each.flat.tensor, group.size)
            each.flat.write_back()
            for part, reduced in each.parts:
                part.copy_(reduced)

    reduces = None
    if len({each.op for each in fused}) == 1:
        reduces = fused[0].op, [each.flat.tensor for each in fused]
    has_barrier = transport.has_barrier and len(fused) == 1
    return Request(key, kind, body, on_leave, has_barrier=has_barrier, reduces=reduces)


def _all_sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


class _Fused(NamedTuple):
    """Tensors of one dtype, as one flat tensor."""

    flat: Flat
    op: str
    """The transport's op."""
    parts: list[tuple[Tensor, Tensor]]
    """Each tensor, and the part of `flat` that is its result."""


def _fused(tensors: Sequence[Tensor], scaling: Scaling) -> list[_Fused]:
    """Flat tensors, one for each dtype. A dtype's only tensor is not copied."""
    if len(tensors) == 1:
        op = scaling.transport_op(tensors[0].dtype)
        return [_Fused(Flat(tensors[0]), op, [])]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    fused = []
    for dtype, alike in by_dtype.items():
        joined = torch.cat([tensor.reshape(-1) for tensor in alike])
        parts = joined.split([tensor.numel() for tensor in alike])
        views = [part.view(each.shape) for part, each in zip(parts, alike, strict=True)]
        pairs = list(zip(alike, views, strict=True))
        fused.append(_Fused(Flat(joined), scaling.transport_op(dtype), pairs))
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
