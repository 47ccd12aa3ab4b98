"""Sums of tensors, each multiplied by its rank's factor: c10d's PREMUL_SUM."""

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
    resolve_with_root,
    split_evenly,
)
from nbdist.collectives.reduction import parse_op
from nbdist.errors import UnsupportedCollective, UsageError

__all__ = [
    "premul_sum_all_reduce",
    "premul_sum_reduce",
    "premul_sum_reduce_scatter",
    "premul_sum_reduce_scatter_tensor",
]

_OP = "premul_sum"
Factor = float | Tensor
"""A number, or a tensor of one element. Ranks may have different factors."""


def premul_sum_all_reduce(
    tensor: Tensor,
    factor: Factor,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """`all_reduce` of `factor * tensor`, in place. Every rank of the group must call.

    Args:
        tensor: as for `all_reduce`, of a floating or complex dtype; overwritten.
        factor: this rank's factor.
        group, async_op, timeout: as for `all_reduce`.
    """
    group, factor = resolve(tensor, group), _checked(factor, tensor)
    plan = group.plan("all_reduce", tensor, _OP)
    flat = Flat(tensor, writes=True)

    def body() -> None:
        scaled = flat.tensor * factor
        plan.transport.all_reduce(scaled, "sum")
        flat.tensor.copy_(scaled)
        flat.write_back()

    return group.start(plan, body, async_op, timeout)


def premul_sum_reduce(
    tensor: Tensor,
    dst: int,
    factor: Factor,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """`reduce` of `factor * tensor` to rank `dst`. See `premul_sum_all_reduce`."""
    group, root = resolve_with_root(tensor, group, dst)
    factor = _checked(factor, tensor)
    plan = group.plan("reduce", tensor, _OP, dst)
    flat = Flat(tensor, writes=group.rank == root)

    def body() -> None:
        scaled = flat.tensor * factor
        plan.transport.reduce(scaled, "sum", root)
        if group.rank == root:
            flat.tensor.copy_(scaled)
            flat.write_back()

    return group.start(plan, body, async_op, timeout)


def premul_sum_reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    factor: Factor,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """`reduce_scatter` of `factor` times the inputs. See `premul_sum_all_reduce`."""
    group, factor = resolve(output, group), _checked(factor, output)
    pieces = flat_for_each_rank("input_list", input_list, output, group)
    plan = group.plan("reduce_scatter", output, _OP)
    flat = Flat(output, writes=True)

    def body() -> None:
        scaled = [each.tensor * factor for each in pieces]
        plan.transport.reduce_scatter(flat.tensor, scaled, "sum")
        flat.write_back()

    return group.start(plan, body, async_op, timeout)


def premul_sum_reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    factor: Factor,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """`premul_sum_reduce_scatter` of a tensor that holds all ranks' parts."""
    group = resolve(output, group)
    parts = split_evenly("input", input, output, group)
    return premul_sum_reduce_scatter(
        output, parts, factor, group=group, async_op=async_op, timeout=timeout
    )


def _checked(factor: Factor, tensor: Tensor) -> Factor:
    """The factor as a value whose product with the tensor has the tensor's dtype."""
    parse_op("sum", tensor.dtype)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise UnsupportedCollective(
            f"PREMUL_SUM of {tensor.dtype}: expected a floating or complex dtype"
        )
    if not isinstance(factor, Tensor):
        return factor
    if factor.numel() != 1:
        raise UsageError(
            f"PREMUL_SUM: a factor of {factor.numel()} elements: expected one element"
        )
    return factor.detach().reshape(()).to(tensor.device, tensor.dtype)
