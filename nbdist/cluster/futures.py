"""Calls that run in the background, and the futures of their results."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

__all__ = ["BackgroundCalls", "CallFuture"]

T = TypeVar("T")


class CallFuture(Future[T]):
    """The result of a call that runs in the background.

    It is a `concurrent.futures.Future`: `result(timeout)`, `done`, `add_done_callback`,
    `concurrent.futures.wait` and `as_completed` work with it. In a coroutine,
    `await future` waits without blocking the event loop.

    `cancel` succeeds until the call has begun. After that, `Cluster.interrupt` ends the
    call.
    """

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


class BackgroundCalls:
    """Runs calls in the order in which they were made.

    The calls run on a thread, which ends when no call is left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._pending: dict[Future[Any], None] = {}

    def submit(self, fn: Callable[[], T]) -> CallFuture[T]:
        """Run a function after those submitted before. Returns its future result."""
        future: CallFuture[T] = CallFuture()
        with self._lock:
            self._pending[future] = None
            self._calls.append(lambda: self._run(future, fn))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="nbdist-calls", daemon=True
                )
                self._thread.start()
        return future

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until all submitted calls have ended, or the time is up.

        On the thread of the calls this does nothing, because a call may make another
        call.
        """
        if self.busy:
            wait(self._unfinished(), timeout_s)

    def cancel(self) -> None:
        """Cancel the calls that have not begun."""
        for future in self._unfinished():
            future.cancel()

    @property
    def busy(self) -> bool:
        """Whether a call is unfinished and this is not the thread of the calls."""
        on_its_thread = threading.current_thread() is self._thread
        return not on_its_thread and bool(self._unfinished())

    def _unfinished(self) -> list[Future[Any]]:
        with self._lock:
            return [future for future in self._pending if not future.done()]

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._thread = None
                    return
                call = self._calls.popleft()
            call()

    def _run(self, future: CallFuture[T], fn: Callable[[], T]) -> None:
        try:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = fn()
            except BaseException as error:  # noqa: BLE001 - it is the call's outcome
                future.set_exception(error)
            else:
                future.set_result(value)
        finally:
            with self._lock:
                del self._pending[future]
