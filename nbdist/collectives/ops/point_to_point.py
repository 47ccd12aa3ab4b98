"""send and recv: messages between two ranks, with tags."""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.mailbox import Message
from nbdist.collectives.ops.validation import (
    resolve,
    resolve_with_root,
    root_position,
)

__all__ = ["irecv", "isend", "recv", "send"]


def isend(
    tensor: Tensor, dst: int, *, group: Group | None = None, tag: int = 0
) -> Message:
    """Start to send a tensor to rank `dst`, which must receive it.

    Args:
        tensor: of any shape, on a device as for `all_reduce`. It must not change before
            the message's `wait` has returned.
        dst: the world rank that receives.
        group: the group of both ranks. Default: all ranks.
        tag: 0 to 1048575. Messages with one tag between two ranks keep their order.

    Returns:
        The message, a `dist.Work`. It makes progress while a thread waits for it.
    """
    group, target = resolve_with_root(tensor, group, dst)
    return group.mailbox.send(tensor, target, tag)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    *,
    group: Group | None = None,
    tag: int = 0,
) -> Message:
    """Start to receive a tensor from rank `src`.

    Args:
        tensor: of any shape, on a device as for `all_reduce`, with the dtype and number
            of elements of the sender's tensor; overwritten.
        src: the world rank that sends; None receives from any rank.
        group: the group of both ranks. Default: all ranks.
        tag: the tag that the sender uses.

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
    """Send a tensor to rank `dst`, and wait until the tensor may change.

    Args:
        tensor, dst, group, tag: as for `isend`.
        timeout: seconds or a timedelta; None sets no limit.

    Raises:
        CollectiveTimeout: `timeout` has passed.
        CollectiveAborted: the message was released, or rank `dst` has died.
    """
    isend(tensor, dst, group=group, tag=tag).wait(timeout)


def recv(
    tensor: Tensor,
    src: int | None = None,
    *,
    group: Group | None = None,
    tag: int = 0,
    timeout: float | timedelta | None = None,
) -> int:
    """Receive a tensor from rank `src`.

    Args:
        tensor, src, group, tag: as for `irecv`.
        timeout: seconds or a timedelta; None sets no limit.

    Returns:
        The sender's world rank.

    Raises:
        CollectiveTimeout: `timeout` has passed.
        CollectiveMismatch: the sender's tensor has another dtype or number of elements.
        CollectiveAborted: the message was released, or rank `src` has died.
    """
    message = irecv(tensor, src, group=group, tag=tag)
    message.wait(timeout)
    assert message.source is not None  # the message was received
    return resolve(tensor, group).ranks[message.source]
