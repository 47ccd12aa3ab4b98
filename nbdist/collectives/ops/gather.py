"""gather: copies every rank's tensor to one rank."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle
from nbdist.collectives.ops.validation import Flat, flat_on_root, resolve_with_root

__all__ = ["gather"]


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int = 0,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """Copy rank r's tensor into rank `dst`'s `gather_list[r]`. Every rank must call.

    Args:
        tensor: as for `all_reduce`; not changed.
        gather_list: on `dst`, one tensor per rank, each with the dtype and number of
            elements of `tensor`; overwritten. None on other ranks.
        dst: the world rank that receives.
        group, async_op, timeout: as for `all_reduce`.
    """
    group, root = resolve_with_root(tensor, group, dst)
    outputs = flat_on_root("gather_list", gather_list, tensor, group, root, writes=True)
    plan = group.plan("gather", tensor, root=dst)
    flat = Flat(tensor)

    def body() -> None:
        wanted = None if outputs is None else [each.tensor for each in outputs]
        plan.transport.gather(wanted, flat.tensor, root)
        for each in outputs or ():
            each.write_back()

    return group.start(plan, body, async_op, timeout)
