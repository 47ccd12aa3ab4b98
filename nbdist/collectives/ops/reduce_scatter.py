"""reduce_scatter: gives each rank its part of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle
from nbdist.collectives.ops.validation import (
    Flat,
    flat_for_each_rank,
    resolve,
    split_evenly,
)
from nbdist.collectives.reduction import ReduceOp, parse_op

__all__ = ["reduce_scatter", "reduce_scatter_tensor"]


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp = "sum",
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """Reduce `input_list[r]` of all ranks into rank r's output. Every rank must call.

    Args:
        output: as `tensor` for `all_reduce`; overwritten.
        input_list: one tensor per rank, each with the dtype and number of elements of
            `output`; not changed.
        op: as for `all_reduce`.
        group, async_op, timeout: as for `all_reduce`.
    """
    group = resolve(output, group)
    pieces = flat_for_each_rank("input_list", input_list, output, group)
    name = parse_op(op, output.dtype)
    plan = group.plan("reduce_scatter", output, name)
    flat = Flat(output, writes=True)

    def body() -> None:
        inputs = [each.tensor for each in pieces]
        plan.transport.reduce_scatter(flat.tensor, inputs, name)
        flat.write_back()

    return group.start(plan, body, async_op, timeout)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: ReduceOp = "sum",
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """`reduce_scatter` of one tensor with all ranks' parts, in rank order.

    Every rank must call.

    Args:
        output: as for `reduce_scatter`.
        input: a tensor of world-size times the elements of `output`, with its dtype;
            not changed.
        op, group, async_op, timeout: as for `all_reduce`.
    """
    group = resolve(output, group)
    parts = split_evenly("input", input, output, group)
    return reduce_scatter(
        output, parts, op, group=group, async_op=async_op, timeout=timeout
    )
