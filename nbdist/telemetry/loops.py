"""The loops of known length that a rank is in, and how far they are."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from nbdist.wire import StepProgress

__all__ = ["Loops"]

STILL_S = 10.0
"""A loop that has made no step for so long is not shown while an inner one does."""


class _Loop:
    """An iterator that is followed."""

    def __init__(self, iterator: Any, done: Callable[[Any], int], total: int) -> None:
        self._reference = weakref.ref(iterator)
        self._done, self.total = done, total
        self.count = 0
        self.moved = time.monotonic()
        """When the count was last seen to have changed, on the monotonic clock."""

    @property
    def iterator(self) -> Any:
        return self._reference()

    def is_running(self) -> bool:
        """Look at the iterator. Returns whether it has batches left."""
        iterator = self._reference()
        if iterator is None:
            return False
        count = self._done(iterator)
        if count != self.count:
            self.count, self.moved = count, time.monotonic()
        return count < self.total


class Loops:
    """Follows iterators that count what they have given.

    The progress is that of the outermost loop that makes steps. While one over
    validation data runs in the middle of one over training data, it is soon the inner
    one's.
    """

    def __init__(self) -> None:
        self._loops: list[_Loop] = []

    def begin(self, iterator: Any, done: Callable[[Any], int], total: int) -> None:
        """Follow an iterator until it has given all batches, or is deleted.

        Args:
            iterator: The iterator. It is not kept alive.
            done: Returns how many batches the iterator has given. Any thread may call
                it.
            total: The number of batches.
        """
        others = [each for each in self._loops if each.iterator not in (None, iterator)]
        self._loops = [*others, _Loop(iterator, done, total)]

    def progress(self) -> StepProgress | None:
        """The progress now; None outside of such loops. Any thread may call this."""
        running = [each for each in self._loops if each.is_running()]
        if not running:
            return None
        since = time.monotonic() - STILL_S
        moving = (each for each in running if each.moved > since)
        shown = next(moving, running[-1])
        return StepProgress(time.time(), shown.count, shown.total, "batches")

    def clear(self) -> None:
        """Follow no loop any longer."""
        self._loops = []
