"""scatter: sends each rank one tensor of a list."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle
from nbdist.collectives.ops.validation import Flat, flat_on_root, resolve_with_root

__all__ = ["scatter"]


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """Copy rank `src`'s `scatter_list[r]` into rank r's tensor. Every rank must call.

    Args:
        tensor: as for `all_reduce`; overwritten.
        scatter_list: on `src`, one tensor per rank, each with the dtype and number of
            elements of `tensor`; not changed. None on other ranks.
        src: the world rank that sends.
        group, async_op, timeout: as for `all_reduce`.
    """
    group, root = resolve_with_root(tensor, group, src)
    inputs = flat_on_root("scatter_list", scatter_list, tensor, group, root)
    plan = group.plan("scatter", tensor, root=src)
    flat = Flat(tensor, writes=True)

    def body() -> None:
        offered = None if inputs is None else [each.tensor for each in inputs]
        plan.transport.scatter(flat.tensor, offered, root)
        flat.write_back()

    return group.start(plan, body, async_op, timeout)
