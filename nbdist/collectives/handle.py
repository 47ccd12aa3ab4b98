"""The handle of an asynchronous call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from nbdist.collectives.sync import timeout_clock
from nbdist.errors import CollectiveTimeout

__all__ = ["Handle"]


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
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Handle], None]] = []
        self._error: BaseException | None = None

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
            raise self._error
        return True

    def _wait(self, timeout: float | None) -> bool:
        end = None if timeout is None else timeout_clock.now() + timeout
        try:
            while not self._done.wait(timeout):
                # More is left if the clock was held meanwhile.
                timeout = 0.0 if end is None else end - timeout_clock.now()
                if timeout <= 0:
                    return False
            return True
        except KeyboardInterrupt as error:
            if self._on_leave is not None:
                self._on_leave(error)
            raise

    def is_completed(self) -> bool:
        """Whether the call has ended, with success or an error."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether the call has ended with its result in place."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """The error of the call; None while it is under way and after success."""
        return self._error

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Call `callback(self)` when the call ends, or at once if it has ended."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def complete(self, error: BaseException | None = None) -> None:
        """End the call. A second call has no effect."""
        with self._lock:
            if self._done.is_set():
                return
            self._error = error
            self._done.set()
        for callback in self._callbacks:
            callback(self)
