"""broadcast: one rank's tensor to all."""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle
from nbdist.collectives.ops.validation import Flat, resolve, root_position
from nbdist.collectives.signature import signature

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
        tensor: any shape, equal shape and dtype on all ranks; overwritten except on
            `src`.
        src: a world rank.
        group, async_op, timeout: as for `all_reduce`.
    """
    group = resolve(tensor, group)
    root = root_position(group, src)
    device = tensor.device.type
    transport = group.transport(tensor.device)
    kind = signature("broadcast", None, src, tensor.dtype, tensor.shape, device)
    flat = Flat(tensor)

    def body() -> None:
        transport.broadcast(flat.tensor, root)
        flat.write_back()

    return group.run(
        kind, body, meets=transport.meets, async_op=async_op, timeout=timeout
    )
