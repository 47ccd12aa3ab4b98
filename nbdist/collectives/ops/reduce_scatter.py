"""reduce_scatter: gives each rank its part of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle
from nbdist.collectives.ops.validation import (
    Flat,
    check_list,
    check_same,
    flatten,
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
        output: any shape, equal on all ranks; overwritten.
        input_list: one tensor per rank, each with output's dtype and number of
            elements; kept.
        op: as for `all_reduce`.
        group, async_op, timeout: as for `all_reduce`.
    """
    group = resolve(output, group)
    check_list("input_list", input_list, group)
    check_same("input_list", input_list, output)
    name = parse_op(op, output.dtype)
    plan = group.plan("reduce_scatter", output, name)
    flat, pieces = Flat(output), flatten(input_list)

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
    """`reduce_scatter` of a tensor that holds all ranks' parts one after the other.

    Args:
        output: any shape, equal on all ranks; overwritten.
        input: world-size times as many elements, same dtype; kept.
        op, group, async_op, timeout: as for `all_reduce`.
    """
    group = resolve(output, group)
    parts = split_evenly("input", input, output, group)
    return reduce_scatter(
        output, parts, op, group=group, async_op=async_op, timeout=timeout
    )
