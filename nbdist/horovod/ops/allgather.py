"""allgather: joins the ranks' tensors along the first dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nbdist.collectives import Group
from nbdist.collectives.ops.validation import flatten, resolve
from nbdist.errors import UsageError
from nbdist.horovod.handles import begin, complete
from nbdist.horovod.negotiation import Request, named
from nbdist.horovod.ops.allreduce import grouped_allreduce
from nbdist.horovod.process_sets import ProcessSet, coordinator_of, global_process_set
from nbdist.horovod.reduce_ops import Average

__all__ = [
    "allgather",
    "allgather_async",
    "grouped_allgather",
    "grouped_allgather_async",
]


def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Join all ranks' tensors along the first dimension. Every rank must call.

    Gradients flow through: the result's gradients are averaged over the ranks, and each
    rank gets the rows of its own tensor, as in Horovod since 0.22.

    Args:
        tensor: With at least one dimension, on a device as for `allreduce`; not
            changed. The dtype and all dimensions but the first are equal on all ranks.
        name, process_set: As for `allreduce`.

    Returns:
        The joined tensors, in rank order, with the same dtype and device.
    """
    gathered: Tensor = _Allgather.apply(False, name, process_set, tensor)[0]
    return gathered


def allgather_async(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allgather`; returns a handle. No gradients flow through."""
    handle: int = _start(
        begin, [tensor], False, name, process_set, lambda found, _: found[0]
    )
    return handle


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allgather` of each of several tensors, as one call.

    Every rank of the set must call.
    """
    return list(_Allgather.apply(True, name, process_set, *tensors))


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allgather`; returns a handle. No gradients flow through."""
    handle: int = _start(
        begin, tensors, True, name, process_set, lambda found, _: found
    )
    return handle


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grouped: bool,
        name: str | None,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        found, rows = _start(
            complete, tensors, grouped, name, process_set, lambda *both: both
        )
        ctx.process_set, ctx.rows = process_set, rows
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        own = ctx.process_set.rank()
        reduced = grouped_allreduce(gradients, op=Average, process_set=ctx.process_set)
        mine = [
            gradient.split(counts)[own]
            for gradient, counts in zip(reduced, ctx.rows, strict=True)
        ]
        return None, None, None, *mine


def _start(
    how: Callable[..., Any],
    tensors: Sequence[Tensor],
    grouped: bool,
    name: str | None,
    process_set: ProcessSet,
    pick: Callable[[list[Tensor], list[list[int]]], Any],
) -> Any:
    """Gather tensors.

    Args:
        how: `begin`, or `complete` to wait for the result.
        grouped: Whether the user has called the grouped operation.
        pick: Makes the call's result of the gathered tensors and the row counts.
    """
    coordinator = coordinator_of(process_set)
    group = coordinator.group
    for tensor in tensors:
        _check(tensor, group)
    if not tensors:
        raise UsageError("grouped_allgather of no tensors: pass at least one")
    operation = "grouped_allgather" if grouped else "allgather"
    first = tensors[0]
    kind = named(operation, name, None, None, first, _widths(tensors, grouped))
    inputs = flatten([tensor.detach() for tensor in tensors])
    found: list[Tensor] = []
    rows: list[list[int]] = []

    def body() -> None:
        rows[:] = _row_counts(tensors, group)
        transport = group.transport(first.device)
        for tensor, flat, counts in zip(tensors, inputs, rows, strict=True):
            output = tensor.new_empty((sum(counts), *tensor.shape[1:]))
            pieces = [piece.reshape(-1) for piece in output.split(counts)]
            longest = max(map(len, pieces))
            transport.all_to_all(pieces, [flat.tensor] * group.size, longest)
            found.append(output)

    request = Request(coordinator.name(operation, name), kind, body, coordinator.abort)
    return how(coordinator, request, lambda: pick(found, rows))


def _check(tensor: Tensor, group: Group) -> None:
    resolve(tensor, group)
    if tensor.dim() == 0:
        raise UsageError("allgather of a 0-d tensor: pass tensor.view(1)")


def _widths(tensors: Sequence[Tensor], grouped: bool) -> tuple[int, ...]:
    """The dimensions that must agree between ranks: all but the first."""
    if not grouped:
        return (-1, *tensors[0].shape[1:])
    return tuple(size for tensor in tensors for size in (-1, *tensor.shape[1:]))


def _row_counts(tensors: Sequence[Tensor], group: Group) -> list[list[int]]:
    """For each tensor, the number of rows on each rank."""
    mine = torch.tensor([len(tensor) for tensor in tensors], device="cpu")
    table = mine.new_empty(group.size, len(tensors))
    group.transport("cpu").all_gather(list(table), mine)
    counts: list[list[int]] = table.T.tolist()
    return counts
