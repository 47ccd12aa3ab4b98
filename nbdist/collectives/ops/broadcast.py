"""broadcast: copies one rank's tensor to all ranks."""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle
from nbdist.collectives.ops.validation import Flat, resolve, root_position

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
        tensor: on the CPU or this rank's GPU, of any shape, with equal shape and dtype
            on all ranks; overwritten, except on `src`.
        src: the world rank that sends.
        group, async_op, timeout: as for `all_reduce`.
    """
    group = resolve(tensor, group)
    root = root_position(group, src)
    plan = group.plan("broadcast", tensor, root=src)
    flat = Flat(tensor)

    def body() -> None:
        plan.transport.broadcast(flat.tensor, root)
        flat.write_back()

    return group.start(plan, body, async_op, timeout)
