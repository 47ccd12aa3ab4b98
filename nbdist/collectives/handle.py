"""The handle of an asynchronous call."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from nbdist.collectives.sync import timeout_clock
from nbdist.errors import CollectiveAborted, CollectiveTimeout

__all__ = ["Handle", "UnseenError", "forget_unseen_errors", "unseen_errors"]

_FOLLOW = (CollectiveAborted, KeyboardInterrupt)
"""Errors that follow from another one, which is told."""
_unseen: collections.deque[Handle] = collections.deque(maxlen=100)
"""The last handles whose call has failed."""
_looks = 0
"""How often this process has looked at them."""
_forgotten = -1
"""The number of looks before which calls were begun that are forgotten."""


class UnseenError(NamedTuple):
    """The error of a call for which nobody has waited or asked."""

    call: str
    """Such as "all_reduce of In[3] line 2"."""
    error: BaseException
    is_old: bool
    """Whether the call was begun before the last look at these errors."""


def unseen_errors() -> list[UnseenError]:
    """The unseen errors since the last look, each of which is returned once.

    The errors of calls that another failure has released are no part of them.
    """
    global _looks
    now, _looks = _looks, _looks + 1
    failed = []
    while _unseen:
        failed.append(_unseen.popleft())
    return [
        UnseenError(each._label, each._error, each._begun < now)
        for each in failed
        if each._error is not None and not each._is_seen and each._begun > _forgotten
    ]


def forget_unseen_errors() -> None:
    """Return no error of the calls until now, also if they have not failed yet."""
    global _forgotten, _looks
    _forgotten, _looks = _looks, _looks + 1


class Handle(dist.Work):
    """An asynchronous collective: a `dist.Work` whose `wait` a signal can interrupt.

    Callbacks run in the thread that completes the call.
    """

    def __init__(
        self, label: str, on_leave: Callable[[BaseException], object] | None = None
    ) -> None:
        """Make a handle for a call that is about to start.

        Args:
            label: the call's name in errors.
            on_leave: called with the error, such as KeyboardInterrupt, that ends a wait
                before the call has ended.
        """
        super().__init__()
        self._label = label
        self._on_leave = on_leave
        self._ended = False
        # An Event would be left locked by an interrupt between two lines of its `wait`,
        # and `complete` would then wait forever. All of this is C code.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One item once the call has ended."""
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Handle], None]] = []
        self._error: BaseException | None = None
        self._begun = _looks
        self._is_seen = False
        """Whether someone has taken the error, or takes it when it comes."""

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the result is in place.

        Args:
            timeout: seconds or a timedelta; None or zero waits until the call ends.
                After a time-out the call continues, and `wait` can be called again.

        Returns:
            True.

        Raises:
            CollectiveTimeout: `timeout` has passed.
            BaseException: The error with which the call has failed.
        """
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        if not self._wait(timeout or None):
            raise CollectiveTimeout(f"{self._label} is not done after {timeout} s")
        if self._error is not None:
            self._is_seen = True
            raise self._error
        return True

    def _wait(self, timeout: float | None) -> bool:
        end = None if timeout is None else timeout_clock.now() + timeout
        try:
            while not self._ended:
                try:
                    self._await_news(timeout)
                except queue.Empty:
                    # More is left if the clock was held meanwhile.
                    timeout = 0.0 if end is None else end - timeout_clock.now()
                    if timeout <= 0:
                        return self._ended
            return True
        except KeyboardInterrupt as error:
            if self._on_leave is not None:
                self._on_leave(error)
            raise

    def _await_news(self, timeout: float | None) -> None:
        """Wait until the call has ended.

        Raises:
            queue.Empty: The seconds have passed.
        """
        if self._ended:
            return
        try:
            self._news.get(timeout=timeout)
        finally:
            if self._ended:
                self._news.put(None)  # wakes the next thread that waits

    def is_completed(self) -> bool:
        """Whether the call has ended, with success or an error."""
        return self._ended

    def is_success(self) -> bool:
        """Whether the call has ended with its result in place."""
        return self._ended and self._error is None

    def exception(self) -> BaseException | None:
        """The error of the call; None while it is under way and after success."""
        self._is_seen |= self._error is not None
        return self._error

    def await_end(self, until: float) -> None:
        """Wait until the call has ended, until a monotonic time. Raises no error."""
        with contextlib.suppress(queue.Empty):
            self._await_news(max(0.0, until - time.monotonic()))

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Call `callback(self)` when the call ends, or at once if it has ended.

        A callback that needs the error asks for it by `exception`.
        """
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback(self)

    def complete(self, error: BaseException | None = None) -> None:
        """End the call. A second call has no effect."""
        with self._lock:
            if self._ended:
                return
            self._error = error
            self._ended = True
            self._news.put(None)
        if error is not None and not isinstance(error, _FOLLOW):
            _unseen.append(self)
        for callback in self._callbacks:
            callback(self)
