"""reduce: reduces the tensors of all ranks into one rank's."""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle
from nbdist.collectives.ops.validation import Flat, resolve_with_root
from nbdist.collectives.reduction import ReduceOp, parse_op

__all__ = ["reduce"]


def reduce(
    tensor: Tensor,
    dst: int = 0,
    op: ReduceOp = "sum",
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """Reduce the ranks' tensors into rank `dst`'s. Every rank must call.

    Args:
        tensor: as for `all_reduce`; overwritten on `dst`, not changed on other ranks.
        dst: the world rank that gets the result.
        op: as for `all_reduce`.
        group, async_op, timeout: as for `all_reduce`.
    """
    group, root = resolve_with_root(tensor, group, dst)
    name = parse_op(op, tensor.dtype)
    plan = group.plan("reduce", tensor, name, dst)
    flat = Flat(tensor, writes=group.rank == root)

    def body() -> None:
        plan.transport.reduce(flat.tensor, name, root)
        if group.rank == root:
            flat.write_back()

    return group.start(plan, body, async_op, timeout)
