"""Who waits for other ranks outside a group's own calls."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Protocol

from nbdist.wire import CollectiveCall

__all__ = ["Waiter", "waiters"]


class Waiter(Protocol):
    """Something in which this process waits, and which can let it out."""

    @property
    def call(self) -> CollectiveCall | None:
        """What this process waits for there right now."""

    @property
    def spent(self) -> bool:
        """Whether it was left halfway."""

    def abort(self, error: BaseException) -> None:
        """End the wait with an error, and every later one. Any thread may call."""

    def lose(self, ranks: Collection[int], reason: str) -> None:
        """These world ranks will not come any more. Any thread may call."""

    def close(self) -> None:
        """The ranks meet anew: what was under way is given up."""


waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
"""All of this process."""
