"""Calls that run in the background, and the futures of their results."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from nbdist.ipc.locks import Future, await_all
from nbdist.widgets.kernel_activity import kept_active

__all__ = ["BackgroundCalls", "CallFuture"]

T = TypeVar("T")


class CallFuture(Future[T]):
    """The result of a call that runs in the background.

    It is a `concurrent.futures.Future`: `result(timeout)`, `done`, `add_done_callback`,
    `concurrent.futures.wait` and `as_completed` work with it. In a coroutine,
    `await future` waits without blocking the event loop.

    `cancel` succeeds until the call has begun. After that, `interrupt` ends the call.

    Args:
        what: The name of the call, such as "In[5]".
    """

    def __init__(self, what: str = "a call") -> None:
        super().__init__()
        self.what = what
        self._begun_at: float | None = None
        self._ended_at: float | None = None
        self._is_interrupt_asked = False

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    @property
    def seconds(self) -> float | None:
        """Seconds since the call began, or that it took; None before it has begun."""
        if self._begun_at is None:
            return None
        return (self._ended_at or time.monotonic()) - self._begun_at

    def interrupt(self) -> None:
        """Interrupt the call on its ranks, or cancel it if it has not begun.

        This returns at once. `result` then raises CellInterrupted, or CancelledError if
        the call had not begun. A call that has ended is not affected.
        """
        if not self.cancel():
            self._is_interrupt_asked = True


class BackgroundCalls:
    """Runs calls in the order in which they were made.

    The calls run on a thread, which ends when no call is left. Until then the
    notebook's server does not count the kernel as idle. Each call runs in a copy of the
    context in which it was submitted: what it prints is shown in the output of the
    notebook's cell that has submitted it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._pending: dict[CallFuture[Any], None] = {}
        self._running: CallFuture[Any] | None = None

    def submit(self, fn: Callable[[], T], what: str = "a call") -> CallFuture[T]:
        """Run a function after those submitted before. Returns its future result.

        Args:
            fn: The function.
            what: The name of the call.
        """
        future: CallFuture[T] = CallFuture(what)
        context = contextvars.copy_context()
        with self._lock:
            self._pending[future] = None
            self._calls.append(lambda: context.run(self._run, future, fn))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="nbdist-calls", daemon=True
                )
                self._thread.start()
        return future

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until all submitted calls have ended, or the time is up.

        On the thread of the calls this does nothing, because a call may make another
        call.

        Returns:
            Whether there is nothing to wait for any longer.
        """
        if self.busy:
            await_all(self.unfinished(), timeout_s)
        return not self.busy

    def cancel(self) -> None:
        """Cancel the calls that have not begun."""
        for future in self.unfinished():
            future.cancel()

    @property
    def busy(self) -> bool:
        """Whether a call is unfinished and this is not the thread of the calls."""
        if not self._pending or self.is_this_thread:
            return False
        return bool(self.unfinished())

    @property
    def is_this_thread(self) -> bool:
        """Whether this is the thread of the calls."""
        return threading.current_thread() is self._thread

    def is_interrupt_asked(self) -> bool:
        """Whether this is the thread of the calls, and its call must be interrupted."""
        running = self._running
        if running is None or not running._is_interrupt_asked:
            return False
        return self.is_this_thread

    def take_interrupt(self) -> bool:
        """As `is_interrupt_asked`. The caller interrupts the call if this is true."""
        if not self.is_interrupt_asked():
            return False
        assert self._running is not None
        self._running._is_interrupt_asked = False
        return True

    def unfinished(self) -> list[CallFuture[Any]]:
        """The calls that run or wait for their turn, in their order."""
        with self._lock:
            return [future for future in self._pending if not future.done()]

    def _work(self) -> None:
        with kept_active():
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
            self._running, future._begun_at = future, time.monotonic()
            try:
                value = fn()
            except BaseException as error:  # noqa: BLE001 - it is the call's outcome
                future._ended_at = time.monotonic()
                future.set_exception(error)
            else:
                future._ended_at = time.monotonic()
                future.set_result(value)
        finally:
            self._running = None
            with self._lock:
                del self._pending[future]
