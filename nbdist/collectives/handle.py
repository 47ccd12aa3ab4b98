"""What an asynchronous call gives back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from nbdist.errors import CollectiveTimeout

__all__ = ["Handle"]


class Handle(dist.Work):
    """A collective under way, a `dist.Work` that Python signals can interrupt.

    `add_done_callback` is called from the thread that completes the work.
    """

    def __init__(
        self, label: str, on_leave: Callable[[BaseException], object] | None = None
    ) -> None:
        """Make one for a call that is about to start.

        Args:
            label: what to call it in errors.
            on_leave: told of the interrupt that ended a wait, with the call under way.
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
                Running out of it leaves the call under way.

        Returns:
            True.

        Raises:
            CollectiveTimeout: `timeout` ran out.
            BaseException: what ended the call.
        """
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        if not self._wait(timeout or None):
            raise CollectiveTimeout(f"{self._label} is not done after {timeout} s")
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, timeout: float | None) -> bool:
        try:
            return self._done.wait(timeout)
        except KeyboardInterrupt as error:
            if self._on_leave is not None:
                self._on_leave(error)
            raise

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether the call has ended with its result in place."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """What ended the call; None while it is under way or when it went well."""
        return self._error

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Call `callback(self)` once the call has ended; at once if it has."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def complete(self, error: BaseException | None = None) -> None:
        """End the call. Later calls change nothing."""
        with self._lock:
            if self._done.is_set():
                return
            self._error = error
            self._done.set()
        for callback in self._callbacks:
            callback(self)
