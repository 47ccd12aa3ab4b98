"""All groups of this process: what it waits in, and what ends or renews them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nbdist.collectives.waiters import Waiter, waiters
from nbdist.errors import CollectiveAborted, WrongProcess
from nbdist.wire import CollectiveCall, format_ranks

if TYPE_CHECKING:
    from nbdist.collectives.group import Group

__all__ = [
    "any_broken",
    "calls_made",
    "close_groups",
    "current_call",
    "default_group",
    "leave_notes",
    "live",
    "release_calls",
    "release_calls_with",
    "renew_groups",
    "set_default_group",
]

live: set[Group] = set()
"""Every group that is not closed. Held, for all members must renew the same ones."""
default: Group | None = None
"""The group that collectives use when they are not given one."""


def leave_notes() -> None:
    """Tell every group of this process where it waits: another may be missing it."""
    call = current_call()
    for group in list(live):
        if group.size > 1:
            group.leave_note(str(call or ""))


def _waited_in() -> list[Group | Waiter]:
    return [*list(live), *list(waiters)]


def current_call() -> CollectiveCall | None:
    """The collective this process is in right now, on any group; None when in none."""
    return next((call for each in _waited_in() if (call := each.call)), None)


def calls_made() -> int:
    """Collectives and messages begun by this process, on all its groups."""
    return sum(group.sequence + group.mailbox.sequence for group in list(live))


def renew_groups(generation: int) -> None:
    """Renew every group of this process. All ranks of the world must call.

    Groups are made by calls that all their members make in the same order, so the order
    in which they were made is one that all members can renew them in. One that a member
    has closed meanwhile, in a cell that others did not finish, is closed on all.
    """
    for waiter in list(waiters):
        waiter.close()
    groups = sorted(live, key=lambda group: group.number)
    held = default_group().comm.allgather({group.identity for group in groups})
    for group in groups:
        gone = [rank for rank in group.ranks if group.identity not in held[rank]]
        if gone:
            reason = f"rank {format_ranks(gone)} has ended this group of ranks"
            error = CollectiveAborted(f"{reason}: make it anew, on all of them")
            group.give_up(error)
        else:
            group.renew(generation)


def close_groups() -> None:
    """Close every group of this process: its ranks are to meet in new ones."""
    for waiter in list(waiters):
        waiter.close()
    for group in list(live):
        group.give_up(CollectiveAborted("this group of ranks was closed"))
    set_default_group(None)


def any_broken() -> bool:
    """Whether a group of this process waits to be renewed."""
    return any(each.broken for each in _waited_in())


def release_calls(error: BaseException) -> None:
    """Abort every group in which this process is in a call. Any thread may call."""
    for each in _waited_in():
        if each.call is not None:
            each.abort(error)


def release_calls_with(ranks: Iterable[int], reason: str) -> None:
    """Abort every group with one of these world ranks in it. Any thread may call.

    They will not come, neither to the call that waits for them nor to a later one.
    """
    gone = set(ranks)
    for waiter in list(waiters):
        waiter.lose(gone, reason)
    for group in list(live):
        if gone.intersection(group.ranks):
            call = group.call
            what = f"released from {call.operation}: " if call is not None else ""
            group.abort(CollectiveAborted(what + reason))


def set_default_group(group: Group | None) -> None:
    """Set the group that collectives use when they are not given one."""
    global default
    default = group


def default_group() -> Group:
    """The group that collectives use when they are not given one.

    Raises:
        WrongProcess: there is none, as in the notebook kernel.
    """
    if default is None:
        raise WrongProcess(
            "there are no ranks here: call this on a rank, in a %%distributed cell"
        )
    return default


def _refuse_in_child() -> None:
    """A child that a rank forks has the memory of its groups, and is none of them."""
    for group in list(live):
        group.disown()


os.register_at_fork(after_in_child=_refuse_in_child)
