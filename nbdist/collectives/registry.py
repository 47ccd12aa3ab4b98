"""The groups of this process. Finds, releases, renews and closes them."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from nbdist.errors import CollectiveAborted, WrongProcess
from nbdist.wire import CollectiveCall, Tally, format_ranks

if TYPE_CHECKING:
    from nbdist.collectives.group import Group

__all__ = [
    "Waiter",
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
    "settle_calls",
    "tallies",
    "waiters",
]


class Waiter(Protocol):
    """A wait for other ranks that is not a call on a group. It can be released."""

    @property
    def call(self) -> CollectiveCall | None:
        """The call that this process waits in; None if it does not wait."""

    @property
    def broken(self) -> bool:
        """Whether an error has ended a wait. The ranks must then connect again."""

    def abort(self, error: BaseException) -> None:
        """End the wait and every later wait with an error. Any thread may call."""

    def lose(self, ranks: Collection[int], reason: str) -> None:
        """End the waits for these world ranks. Any thread may call."""

    def close(self) -> None:
        """End every wait, because the groups are renewed or closed."""


class _Waiters:
    """Weak references to waiters.

    A thread may add a waiter while another thread iterates.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakValueDictionary[int, Waiter] = (
            weakref.WeakValueDictionary()
        )

    def add(self, waiter: Waiter) -> None:
        self._all[id(waiter)] = waiter

    def discard(self, waiter: Waiter) -> None:
        self._all.pop(id(waiter), None)

    def __iter__(self) -> Iterator[Waiter]:
        found = [reference() for reference in self._all.valuerefs()]
        return iter([waiter for waiter in found if waiter is not None])


NOTHING = (0, 0, 0)
"""The mark of a group on which nothing has begun."""
waiters = _Waiters()
"""The waiters of this process."""
live: set[Group] = set()
"""Every open group. These references keep a group that its user has dropped, because
all members must renew the same groups."""
default: Group | None = None
"""The group that collectives use by default."""


def leave_notes() -> None:
    """Set a note with the current call in every group of this process.

    The error of a call that times out has the notes of the missing ranks.
    """
    call = current_call()
    for group in list(live):
        if group.size > 1:
            group.leave_note(str(call or ""))


def _waited_in() -> list[Group | Waiter]:
    return [*list(live), *list(waiters)]


def current_call() -> CollectiveCall | None:
    """This process's current collective, on any group; None if there is none."""
    return next((call for each in _waited_in() if (call := each.call)), None)


def calls_made() -> int:
    """The number of collectives and messages started on all groups of this process."""
    return sum(group.sequence + group.mailbox.sequence for group in list(live))


def tallies(known: Mapping[str, object]) -> tuple[dict[str, object], dict[str, Tally]]:
    """What this process has begun on its groups, which their members compare.

    Args:
        known: The first result of an earlier call; {} for the tallies of all groups.

    Returns:
        A mark of each group, and the tallies of the groups whose mark has changed. They
        are named by `Group.key`.
    """
    marks: dict[str, object] = {}
    changed = {}
    for group in list(live):
        if group.size > 1:
            marks[group.key] = mark = group.mark
            if known.get(group.key, NOTHING) != mark:
                changed[group.key] = group.tally
    return marks, changed


def settle_calls(seconds: float) -> None:
    """Wait a while for asynchronous calls that are under way."""
    until = time.monotonic() + seconds
    for group in list(live):
        group.settle(until)


def renew_groups(generation: int, why: str = "") -> None:
    """Renew every group of this process. All ranks of the world must call.

    All members have made their common groups in the same order, so groups are renewed
    in that order. If a member has closed a group, in a cell that other members did not
    finish, the group is closed on all members.
    """
    for waiter in list(waiters):
        waiter.close()
    groups = sorted(live, key=lambda group: group.number)
    held = default_group().comm.allgather({group.identity for group in groups})
    for group in groups:
        gone = [rank for rank in group.ranks if group.identity not in held[rank]]
        if gone:
            reason = f"rank {format_ranks(gone)} has closed this group of ranks"
            error = CollectiveAborted(f"{reason}: make a new group on all its ranks")
            group.give_up(error)
        else:
            group.renew(generation, why)


def close_groups() -> None:
    """Close every group of this process, before new groups replace them."""
    for waiter in list(waiters):
        waiter.close()
    for group in list(live):
        group.give_up(CollectiveAborted("this group of ranks was closed"))
    set_default_group(None)


def any_broken() -> bool:
    """Whether a group or waiter of this process is broken."""
    return any(each.broken for each in _waited_in())


def release_calls(error: BaseException) -> None:
    """Abort every group on which this process has a call. Any thread may call."""
    for each in _waited_in():
        if each.call is not None:
            each.abort(error)


def release_calls_with(ranks: Iterable[int], reason: str) -> None:
    """Abort every group that has one of these world ranks. Any thread may call.

    Args:
        ranks: World ranks that make no further calls.
        reason: The reason, for the error.
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
    """Set the group that collectives use by default."""
    global default
    default = group


def default_group() -> Group:
    """The group that collectives use by default.

    Raises:
        WrongProcess: This process is not a rank, as the notebook's kernel.
    """
    if default is None:
        raise WrongProcess(
            "this process is not a rank: call this on a rank, in a %%distributed cell"
        )
    return default


def _refuse_in_child() -> None:
    """A forked child inherits the groups' memory but is not a member."""
    for group in list(live):
        group.disown()


os.register_at_fork(after_in_child=_refuse_in_child)
