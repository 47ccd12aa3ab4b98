"""Waiting for MPI without blocking in it, so that every wait can be released."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

__all__ = ["Check", "seconds", "wait_until"]

Check = Callable[[], None]
"""Raises when the wait must end: aborted, or out of time."""

_SPINS = 100
_YIELDS = 200
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3


def wait_until(done: Callable[[], bool], check: Check) -> None:
    """Call `done` until it is true: in quick succession first, then ever more rarely.

    Between two calls Python runs its signal handlers, so KeyboardInterrupt comes
    through, and `check` may raise. A long wait costs little CPU: the pause grows to
    one millisecond.
    """
    for _ in range(_SPINS):
        if done():
            return
    for _ in range(_YIELDS):
        if done():
            return
        check()
        os.sched_yield()
    pause = _FIRST_PAUSE_S
    while not done():
        check()
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)


def seconds(duration: float | timedelta) -> float:
    """A duration in seconds, however it was given."""
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    return duration
