"""Waits for MPI and devices that another thread or a signal can end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from mpi4py import MPI

__all__ = [
    "Check",
    "Hooks",
    "Swap",
    "abandon",
    "are_over",
    "complete",
    "seconds",
    "wait_until",
]

Check = Callable[[], None]
"""Raises when the wait must end: the call was aborted, or its time is up."""
Swap = Callable[[Any], list[Any]]
"""Returns every rank's item, in rank order. Every rank must call. An item has at most
a few kB."""

_SPINS = 100
_YIELDS = 200
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_abandoned: list[tuple[list[MPI.Request], tuple[object, ...]]] = []


def wait_until(
    done: Callable[[], bool],
    check: Check,
    longest_pause_s: float = _LONGEST_PAUSE_S,
    spins: int = _SPINS,
) -> None:
    """Call `done` until it returns true, with pauses that grow to `longest_pause_s`.

    Between two calls, KeyboardInterrupt and the errors of `check` end the wait. A long
    wait uses little CPU.

    Args:
        done: what is waited for.
        check: ends the wait by raising.
        longest_pause_s: seconds between two calls of `done` in a long wait.
        spins: number of calls before the first that lets other threads run.
    """
    for _ in range(spins):
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
        pause = min(pause * 1.5, longest_pause_s)


def complete(requests: Sequence[MPI.Request], check: Check, *buffers: object) -> None:
    """Wait for all requests. If an error ends the wait, the buffers are kept alive.

    Args:
        requests: point-to-point, collective or persistent requests.
        check: as for `wait_until`.
        buffers: objects whose memory MPI uses until the requests are done.
    """
    waiting = list(requests)
    try:
        wait_until(lambda: MPI.Request.Testall(waiting), check)
    except BaseException:
        abandon(waiting, *buffers)
        raise


def abandon(requests: Sequence[MPI.Request], *buffers: object) -> None:
    """Keep the buffers of unfinished requests alive until MPI no longer uses them.

    Otherwise a late message could overwrite memory that Python uses again.
    """
    _abandoned[:] = [entry for entry in _abandoned if not are_over(entry[0])]
    _abandoned.append((list(requests), buffers))


def are_over(requests: Sequence[MPI.Request]) -> bool:
    """Whether MPI has finished all requests, with success or an error."""
    try:
        return MPI.Request.Testall(list(requests))
    except MPI.Exception:  # revoked, or the peer has died: MPI has finished
        return True


def seconds(duration: float | timedelta) -> float:
    """A duration in seconds."""
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    return duration


@dataclass
class Hooks:
    """A group's functions for its transports, and the current call's fingerprint."""

    pass_barrier: Callable[[], None]
    """Passes the barrier with the current call's fingerprint."""
    differ: Callable[[], NoReturn]
    """Raises CollectiveMismatch. Called when the ranks' fingerprints differ."""
    check: Check
    """Raises when the current call must end."""
    on_late: Callable[[], None]
    """Called once in each long wait."""
    fingerprint: int = 0
    """The current call's fingerprint; 0 if calls are not compared."""
