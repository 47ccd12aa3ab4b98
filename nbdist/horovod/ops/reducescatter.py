"""reducescatter: gives each rank some rows of the reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nbdist.collectives import Group, chunk_bounds
from nbdist.collectives.ops.validation import resolve
from nbdist.collectives.reduction import parse_op
from nbdist.errors import UnsupportedCollective, UsageError
from nbdist.horovod.compression import Compression, Compressor, compressed
from nbdist.horovod.handles import begin, complete
from nbdist.horovod.negotiation import Request, named
from nbdist.horovod.ops.allgather import grouped_allgather
from nbdist.horovod.process_sets import ProcessSet, coordinator_of, global_process_set
from nbdist.horovod.reduce_ops import (
    Adasum,
    Average,
    ReduceOp,
    Scaling,
    Sum,
    chosen_op,
    scale,
)

__all__ = [
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the reduction. Every rank of the set must call.

    If the rows cannot be divided evenly, the first ranks get one more. Gradients flow
    through as in Horovod: they are gathered from all ranks, and for Sum multiplied by
    the number of ranks.

    Args:
        tensor: As for `allreduce`, with at least one dimension.
        name, compression, process_set: As for `allreduce`.
        op: Average, Sum, Min, Max or Product.
        prescale_factor, postscale_factor: As for `allreduce`.

    Returns:
        This rank's rows, with the same dtype, on the same device.
    """
    return grouped_reducescatter(
        [tensor],
        name,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
    )[0]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `reducescatter`; returns a handle. No gradients flow through."""
    scaling = Scaling(chosen_op(op, None), prescale_factor, postscale_factor)
    handle: int = _start(
        begin, [tensor], scaling, name, process_set, lambda found: found[0]
    )
    return handle


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of each of several tensors, as one call.

    Every rank of the set must call.
    """
    scaling = Scaling(chosen_op(op, None), prescale_factor, postscale_factor)
    reduce = partial(_Reducescatter.apply, scaling, name, process_set)
    return compressed(compression, tensors, reduce)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `grouped_reducescatter`; returns a handle. No gradients flow through."""
    scaling = Scaling(chosen_op(op, None), prescale_factor, postscale_factor)
    handle: int = _start(begin, tensors, scaling, name, process_set, list)
    return handle


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scaling: Scaling,
        name: str | None,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.scaling, ctx.process_set = scaling, process_set
        found: tuple[Tensor, ...] = _start(
            complete, tensors, scaling, name, process_set, tuple
        )
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scaling: Scaling = ctx.scaling
        factor = scaling.before * scaling.after
        if scaling.op is Sum:
            factor *= ctx.process_set.size()
        scaled = [gradient * factor for gradient in gradients]
        back = grouped_allgather(scaled, process_set=ctx.process_set)
        return None, None, None, *back


def _start(
    how: Callable[..., Any],
    tensors: Sequence[Tensor],
    scaling: Scaling,
    name: str | None,
    process_set: ProcessSet,
    pick: Callable[[list[Tensor]], Any],
) -> Any:
    coordinator = coordinator_of(process_set)
    group = coordinator.group
    if not tensors:
        raise UsageError("grouped_reducescatter of no tensors: pass at least one")
    for tensor in tensors:
        _check(tensor, scaling, group)
    first = tensors[0]
    shape = tuple(size for tensor in tensors for size in tensor.shape)
    kind = named("reducescatter", name, scaling.op.value, None, first, shape)
    inputs = [scale(tensor.detach().clone(), scaling.before) for tensor in tensors]
    found: list[Tensor] = []

    def body() -> None:
        found.extend(_reduce_rows(each.contiguous(), scaling, group) for each in inputs)

    request = Request(
        coordinator.name("reducescatter", name), kind, body, coordinator.abort
    )
    return how(coordinator, request, lambda: pick(found))


def _reduce_rows(rows: Tensor, scaling: Scaling, group: Group) -> Tensor:
    bounds = chunk_bounds(len(rows), group.size)
    most = bounds[0][1]  # no rank has more rows than the first
    pieces = [_padded(rows[begin:end], most) for begin, end in bounds]
    output = rows.new_empty((most, *rows.shape[1:]))
    group.transport(rows.device).reduce_scatter(
        output.view(-1), pieces, scaling.transport_op(rows.dtype)
    )
    begin, end = bounds[group.rank]
    mine = output[: end - begin]
    scaling.finish(mine, group.size)
    return mine


def _padded(rows: Tensor, length: int) -> Tensor:
    """The rows as a flat tensor, with zeros added up to `length` rows."""
    if len(rows) == length:
        return rows.reshape(-1)
    padded = rows.new_zeros((length, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return padded.view(-1)


def _check(tensor: Tensor, scaling: Scaling, group: Group) -> None:
    resolve(tensor, group)
    if tensor.dim() == 0:
        raise UsageError("reducescatter of a 0-d tensor: pass tensor.view(1)")
    if scaling.op is Adasum:
        raise UnsupportedCollective(
            "reducescatter is not defined for Adasum: use allreduce"
        )
    parse_op(scaling.transport_op(tensor.dtype), tensor.dtype)
