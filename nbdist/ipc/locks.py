"""Condition variables, events and futures whose locks no interrupt leaves held.

An interrupt (SIGINT) raises KeyboardInterrupt between two instructions of the main
thread. The `with` statement of `threading.Condition` runs Python code, and so an
interrupt may come right after the lock was acquired, which is then held forever. Any
other thread that needs it waits forever, such as the one that receives the ranks'
answers. `threading.Event` and `concurrent.futures.Future` have such a condition
variable. Here the `with` statement calls the lock itself, which is written in C: the
interrupt comes before the lock is acquired, or within the block. In Python 3.14 this
needs a signal handler that looks at `is_entering` of `ipc/interrupts.py`.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Iterable
from concurrent import futures
from typing import Any, TypeVar

from nbdist.ipc.interrupts import defer_interrupts

__all__ = ["Condition", "Event", "Future", "await_all"]

T = TypeVar("T")


class Condition(threading.Condition):
    """A `threading.Condition` whose lock is not held after an interrupt."""

    # `with` looks these up in the class, and calls what a property returns.
    __enter__ = property(operator.attrgetter("_lock.__enter__"))
    __exit__ = property(operator.attrgetter("_lock.__exit__"))

    def wait(self, timeout: float | None = None) -> bool:
        """As `threading.Condition.wait`. An interrupt ends it, with the lock held."""
        if threading.get_ident() != threading.main_thread().ident:
            return super().wait(timeout)
        condition: Any = self
        waiter = threading.Lock()
        waiter.acquire()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # it was notified, or woken already
                waiter.release()

        with defer_interrupts(wake):
            condition._waiters.append(waiter)
            held = condition._release_save()
            limit_s = -1 if timeout is None else max(0, timeout)
            got = waiter.acquire(timeout=min(limit_s, threading.TIMEOUT_MAX))
            condition._acquire_restore(held)
            with contextlib.suppress(ValueError):  # it was notified
                condition._waiters.remove(waiter)
        return got


class Event(threading.Event):
    """A `threading.Event` whose lock is not held after an interrupt."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = Condition()


class Future(futures.Future[T]):
    """A `concurrent.futures.Future` whose lock is not held after an interrupt."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()


def await_all(waited: Iterable[futures.Future[Any]], timeout_s: float | None) -> bool:
    """Wait until all futures have ended, or the time is up. Returns whether they have.

    `concurrent.futures.wait` acquires their locks in Python.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    for future in waited:
        try:
            future.exception(None if end is None else max(0.0, end - time.monotonic()))
        except futures.CancelledError:
            pass
        except futures.TimeoutError:
            return False
    return True
