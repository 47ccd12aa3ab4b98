"""broadcast: copies one rank's tensor to all ranks."""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle
from nbdist.collectives.ops.validation import Flat, resolve_with_root

__all__ = ["broadcast"]


def broadcast(
    tensor: Tensor,
    src: int = 0,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """Overwrite the tensor on all ranks with rank `src`'s. Every rank must call.

    Args:
        tensor: as for `all_reduce`; overwritten, except on `src`.
        src: the world rank that sends.
        group, async_op, timeout: as for `all_reduce`.
    """
    group, root = resolve_with_root(tensor, group, src)
    plan = group.plan("broadcast", tensor, root=src)
    receives = group.rank != root
    flat = Flat(tensor, writes=receives)

    def body() -> None:
        plan.transport.broadcast(flat.tensor, root)
        if receives:
            flat.write_back()

    return group.start(plan, body, async_op, timeout)
