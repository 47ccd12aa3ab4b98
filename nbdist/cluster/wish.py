"""A change of size that somebody waits for, while the ranks are at work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field

from nbdist.cluster.call import Run
from nbdist.errors import UsageError

__all__ = ["Wish", "Wishes"]

LOOK_S = 0.2


@dataclass
class Wish:
    """One that is not granted yet."""

    run: Run
    size: int
    number: int
    """Counts from 1."""
    outcome: Future[str | None] = field(default_factory=Future)
    """What was done, in words; None when the run ended before."""


class Wishes:
    """At most one at a time. One thread makes it and waits, another grants it."""

    def __init__(self) -> None:
        self.open: Wish | None = None
        self.granted = 0
        """The number of the last one that is none any more."""

    def make(self, run: Run, size: int) -> Wish:
        """Wish that a run's ranks become so many.

        Raises:
            UsageError: There is one already.
        """
        if self.open is not None:
            raise UsageError(f"a change to {self.open.size} ranks is under way")
        self.open = Wish(run, size, self.granted + 1)
        return self.open

    def await_outcome(self, wish: Wish, goes_on: Callable[[], bool]) -> str | None:
        """What was done, in words; None when the run does not go on."""
        while True:
            with contextlib.suppress(NotYet):
                return wish.outcome.result(LOOK_S)
            if not goes_on() and self.open is wish:
                self.grant(None)  # it had ended before it could hear of the wish

    def refuse(self, error: Exception) -> None:
        """It cannot be had: whoever waits for it gets the error."""
        if (wish := self._close()) is not None:
            wish.outcome.set_exception(error)

    def grant(self, outcome: str | None) -> None:
        """It was done, or never will be."""
        if (wish := self._close()) is not None:
            wish.outcome.set_result(outcome)

    def _close(self) -> Wish | None:
        """The wish that was open, which is open no longer."""
        wish, self.open = self.open, None
        if wish is not None:
            self.granted = wish.number
        return wish
