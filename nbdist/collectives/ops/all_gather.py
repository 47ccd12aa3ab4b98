"""all_gather: copies every rank's tensor to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle
from nbdist.collectives.ops.validation import (
    Flat,
    check_contiguous,
    flat_for_each_rank,
    resolve,
    split_evenly,
)

__all__ = ["all_gather", "all_gather_into_tensor"]


def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """Copy rank r's tensor into `tensor_list[r]` on all ranks. Every rank must call.

    Args:
        tensor_list: one tensor per rank, each with the dtype, the kind of device and
            the number of elements of `tensor`; overwritten.
        tensor: as for `all_reduce`; not changed.
        group, async_op, timeout: as for `all_reduce`.
    """
    group = resolve(tensor, group)
    outputs = flat_for_each_rank("tensor_list", tensor_list, tensor, group, writes=True)
    plan = group.plan("all_gather", tensor)
    flat = Flat(tensor)

    def body() -> None:
        plan.transport.all_gather([each.tensor for each in outputs], flat.tensor)
        for each in outputs:
            each.write_back()

    return group.start(plan, body, async_op, timeout)


def all_gather_into_tensor(
    output: Tensor,
    input: Tensor,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """`all_gather` into one tensor, in rank order. Every rank must call.

    Args:
        output: a contiguous tensor of world-size times the elements of `input`, with
            its dtype; overwritten.
        input: as `tensor` for `all_reduce`; not changed.
        group, async_op, timeout: as for `all_reduce`.
    """
    group = resolve(output, group)
    check_contiguous("output", output)
    parts = split_evenly("output", output, input, group)
    return all_gather(parts, input, group=group, async_op=async_op, timeout=timeout)
