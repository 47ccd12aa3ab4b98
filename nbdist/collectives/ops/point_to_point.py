"""send and recv: messages between two ranks, with tags."""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.mailbox import Message
from nbdist.collectives.ops.validation import resolve, root_position

__all__ = ["irecv", "isend", "recv", "send"]


def isend(
    tensor: Tensor, dst: int, *, group: Group | None = None, tag: int = 0
) -> Message:
    """Start to send a tensor to rank `dst`, which must receive it.

    Args:
        tensor: any shape; must not change until the message is waited for.
        dst: a world rank.
        group: default: all ranks.
        tag: 0 to 1048575; messages of one tag between two ranks keep their order.

    Returns:
        The message, a `dist.Work`. It moves while a thread waits for it.
    """
    group = resolve(tensor, group)
    return group.mailbox.send(tensor, root_position(group, dst), tag)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    *,
    group: Group | None = None,
    tag: int = 0,
) -> Message:
    """Start to receive a tensor from rank `src`.

    Args:
        tensor: any shape; overwritten. The sender's has its dtype and as many elements.
        src: a world rank; None receives from any.
        group: default: all ranks.
        tag: the sender's.

    Returns:
        The message, a `dist.Work`. After `wait`, its `source` is the sender.
    """
    group = resolve(tensor, group)
    source = None if src is None else root_position(group, src)
    return group.mailbox.receive(tensor, source, tag)


def send(
    tensor: Tensor,
    dst: int,
    *,
    group: Group | None = None,
    tag: int = 0,
    timeout: float | timedelta | None = None,
) -> None:
    """Send a tensor to rank `dst`. See `isend`; `timeout` is in seconds."""
    isend(tensor, dst, group=group, tag=tag).wait(timeout)


def recv(
    tensor: Tensor,
    src: int | None = None,
    *,
    group: Group | None = None,
    tag: int = 0,
    timeout: float | timedelta | None = None,
) -> int:
    """Receive a tensor from rank `src`. See `irecv`; `timeout` is in seconds.

    Returns:
        The sender's world rank.
    """
    message = irecv(tensor, src, group=group, tag=tag)
    message.wait(timeout)
    assert message.source is not None  # for it was received
    return resolve(tensor, group).ranks[message.source]
