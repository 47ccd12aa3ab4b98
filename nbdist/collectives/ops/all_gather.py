"""all_gather: copies every rank's tensor to all ranks."""

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
from nbdist.errors import UsageError

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
        tensor: on the CPU or this rank's GPU, of any shape, with equal shape and dtype
            on all ranks; not changed.
        group, async_op, timeout: as for `all_reduce`.
    """
    group = resolve(tensor, group)
    check_list("tensor_list", tensor_list, group)
    check_same("tensor_list", tensor_list, tensor)
    plan = group.plan("all_gather", tensor)
    flat, outputs = Flat(tensor), flatten(tensor_list)

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
        input: on the CPU or this rank's GPU, of any shape, with equal shape and dtype
            on all ranks; not changed.
        group, async_op, timeout: as for `all_reduce`.
    """
    group = resolve(output, group)
    if not output.is_contiguous():
        raise UsageError(
            f"output has strides {output.stride()}: expected a contiguous tensor"
        )
    parts = split_evenly("output", output, input, group)
    return all_gather(parts, input, group=group, async_op=async_op, timeout=timeout)
