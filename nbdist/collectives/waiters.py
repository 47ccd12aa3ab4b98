"""Who waits for other ranks outside a group's own calls."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Protocol

from nbdist.wire import CollectiveCall

__all__ = ["Waiter", "waiters"]


class Waiter(Protocol):
    """Something in which this process waits, and which can let it out."""

    @property
    def call(self) -> CollectiveCall | None:
        """What this process waits for there right now."""

    @property
    def broken(self) -> bool:
        """Whether it was left halfway."""

    def abort(self, error: BaseException) -> None:
        """End the wait with an error, and every later one. Any thread may call."""

    def lose(self, ranks: Collection[int], reason: str) -> None:
        """These world ranks will not come any more. Any thread may call."""

    def close(self) -> None:
        """The ranks meet anew: what was under way is given up."""


class _Waiters:
    """Those of this process, as long as somebody else holds them.

    One thread may add one while another goes through them.
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


waiters = _Waiters()
"""All of this process."""
