"""The loops of known length that a rank is in, and how far they are."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from nbdist.wire import StepProgress

__all__ = ["Loops"]


class Loops:
    """Follows iterators that count what they have given.

    The progress is that of the last loop that was begun and has not ended: the one over
    validation data while it runs, and the one over training data before and after it.
    """

    def __init__(self) -> None:
        self._loops: list[tuple[weakref.ref[Any], Callable[[Any], int], int]] = []

    def begin(self, iterator: Any, done: Callable[[Any], int], total: int) -> None:
        """Follow an iterator until it has given all batches, or is deleted.

        Args:
            iterator: The iterator. It is not kept alive.
            done: Returns how many batches the iterator has given. Any thread may call
                it.
            total: The number of batches.
        """
        running = [each for each in self._loops if each[0]() not in (None, iterator)]
        self._loops = [*running, (weakref.ref(iterator), done, total)]

    def progress(self) -> StepProgress | None:
        """The progress now; None outside of such loops. Any thread may call this."""
        for reference, done, total in reversed(self._loops):
            iterator = reference()
            if iterator is not None and (count := done(iterator)) < total:
                return StepProgress(time.time(), count, total, "batches")
        return None

    def clear(self) -> None:
        """Follow no loop any longer."""
        self._loops = []
