"""Signal handlers of a rank, which interrupt user code but not the engine's code."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from nbdist.ipc.interrupts import REPEAT, handler_of, is_entering
from nbdist.ipc.locks import Event
from nbdist.ipc.stacks import cell_of

__all__ = ["Interrupts", "Overdue"]

Handler = Callable[[int, "FrameType | None"], object]

USERS_SIGNALS = [
    signal.Signals[name]
    for name in ("SIGCHLD", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
"""Signals that a library or a cell may handle."""

AROUND_BLOCKS = {
    contextlib.__file__,
    __file__,
    str(Path(__file__).with_name("user_code.py")),
}
"""The files whose code enters and leaves the blocks of `Interrupts.limited`."""

_PYTHONS_OWN: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
"""Python's own handlers of the signals that an engine handles."""

INSIST_S = 0.05
MOST_CAUGHT = 3
"""How often user code may catch Overdue before it is raised at each step."""
IMPORT_S = 30.0
"""Seconds after which an interrupt cuts an import."""
IMPORT_RESTS_S = 2.0
"""Seconds without a new module after which it does so. The notebook waits 5 s."""
INSIST_TIMES = round((IMPORT_S + 10) / INSIST_S)
"""How often the signal is repeated: longer than an interrupt may wait for an import."""
IMPORTLIB = "<frozen importlib._bootstrap>"


class Overdue(KeyboardInterrupt):
    """Raised in user code that has exceeded its time limit."""


class _SuppressErrors:
    """Wraps a signal handler of user code while no user code runs.

    It suppresses the handler's errors, which would otherwise end the rank's main loop.
    For instance, torch's handler of SIGCHLD raises an error when the worker of a
    DataLoader has died. The loop over that loader raises the same error.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(Exception):
            self.handler(signum, frame)


class _Import:
    """An import under way, which proceeds while it adds modules."""

    def __init__(self) -> None:
        self._end = time.monotonic() + IMPORT_S
        self._modules, self._rests_at = 0, 0.0

    def proceeds(self) -> bool:
        now = time.monotonic()
        if len(sys.modules) != self._modules:
            self._modules, self._rests_at = len(sys.modules), now + IMPORT_RESTS_S
        return now < min(self._end, self._rests_at)


class Interrupts:
    """Turns SIGINT into KeyboardInterrupt while user code runs, else ignores it.

    A KeyboardInterrupt in the kernel's own code would lose a reply for which the
    notebook waits. An interrupt belongs to one request. If it arrives before the
    request has begun, it is delivered when the request begins. It never interrupts the
    next request.

    Handlers that user code installs for other signals are called at any time, but their
    errors are raised only in user code.
    """

    def __init__(self) -> None:
        self._request = ""
        self._early: set[str] = set()
        self._pending = False
        self._heard = True
        self._armed = self._deferring = False
        self._waiting: asyncio.Task[object] | None = None
        self._lock = threading.Lock()
        self._forking = threading.local()
        self._wrapped: set[signal.Signals] = set()
        """The signals whose handlers are wrapped in `_SuppressErrors`."""
        self._deadline: float | None = None
        self._ticked = False
        self._overdue = 0
        """How often Overdue was raised in the block."""
        self._import: _Import | None = None
        """The import for whose end an interrupt waits."""
        self.delivered = False
        """Whether the current request has been interrupted."""

    def install(self) -> None:
        """Install the signal handlers. Call from the main thread."""
        self._main_thread = threading.get_ident()
        self._unraisable = sys.unraisablehook
        self._take()
        self._own = _handlers()
        sys.unraisablehook = self._on_unraisable
        self._ours = {s: handler_of(s) for s in _PYTHONS_OWN}
        os.register_at_fork(
            before=self._block_while_forking,
            after_in_parent=self._unblock_after_forking,
            after_in_child=self._forget_in_child,
        )

    def _block_while_forking(self) -> None:
        """Block signals in a forked child until it has Python's own handlers.

        Otherwise the engine's handler would run in the child, and the signal would be
        lost. A pool that terminates a worker right after the fork would wait forever.
        """
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PYTHONS_OWN)

    def _unblock_after_forking(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _forget_in_child(self) -> None:
        """Restore Python's signal handlers in a forked child, such as a pool's worker.

        The engine's handlers would print, and they use a wake-up descriptor of the
        rank's event loop. Handlers that the user has installed stay.
        """
        for signum, handler in _PYTHONS_OWN.items():
            if handler_of(signum) == self._ours[signum]:
                signal.signal(signum, handler)
        signal.set_wakeup_fd(-1)
        sys.unraisablehook = self._unraisable
        self._unblock_after_forking()

    @contextmanager
    def request(self, name: str) -> Iterator[None]:
        """Make this the main thread's current request. Names are unique."""
        self._take()
        self.delivered = False
        with self._lock:
            self._heard, self._import = True, None
            self._request = name
            self._pending = name in self._early
            self._early.discard(name)
        try:
            yield
        finally:
            self._arm(False)
            with self._lock:
                self._request = ""

    def _take(self) -> None:
        """Handle SIGINT again, whose handler or mask a library may have changed.

        After an interrupt, Lightning ignores SIGINT until the process ends.
        """
        if handler_of(signal.SIGINT) != self._on_sigint:
            signal.signal(signal.SIGINT, self._on_sigint)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))

    def interrupt(self, request: str | None) -> None:
        """Interrupt a request. Do not call this in the main thread.

        Args:
            request: The request's name; None means the current request. A request that
                has not begun is interrupted when it begins.
        """
        with self._lock:  # the main thread must not begin the next request meanwhile
            if request is not None and request != self._request:
                self._early.add(request)
            elif self._request:
                self._heard = False
                self._signal()
                threading.Thread(
                    target=self._insist, args=(self._request,), daemon=True
                ).start()

    @contextmanager
    def armed(self, task: asyncio.Task[object] | None = None) -> Iterator[None]:
        """Deliver SIGINT as KeyboardInterrupt within this block.

        Args:
            task: The asyncio task of the user code; None if it is not a coroutine.
        """
        before = self._armed, self._waiting
        self._waiting = task
        try:
            self._arm(True)
            if self._pending and not self._deferring:
                self._pending = False
                self._deliver(task)
            yield
        finally:
            armed, self._waiting = before
            self._arm(armed)

    def _arm(self, armed: bool) -> None:
        """Switch the signal handlers when user code begins or ends."""
        if armed == self._armed:
            return
        self._armed = armed
        if armed:
            for signum in self._wrapped:
                handler = handler_of(signum)
                if isinstance(handler, _SuppressErrors):
                    signal.signal(signum, handler.handler)
            self._wrapped.clear()
            return
        for signum, handler in _handlers().items():
            if handler != self._own.get(signum):
                signal.signal(signum, _SuppressErrors(handler))
                self._wrapped.add(signum)

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Do the same as `armed`, and raise Overdue in the block after `seconds`.

        Overdue is raised again until the block ends, which also ends a loop that
        catches every error. Call from the main thread.
        """
        over = Event()
        self._overdue = 0
        clock = threading.Thread(
            target=self._tick, args=(over, seconds), name="nbdist-limit", daemon=True
        )
        try:
            clock.start()
            with self.armed():
                try:
                    self._deadline = time.monotonic() + seconds
                    yield
                finally:
                    self._deadline = None
        finally:
            self._deadline = None
            over.set()
            clock.join()  # the thread's last signal is handled before this returns
            self._ticked = False
            self._overdue = 0

    def _tick(self, over: Event, seconds: float) -> None:
        """Signal the main thread again and again, from the deadline until `over`."""
        pause_s = seconds
        while not over.wait(pause_s):
            pause_s = INSIST_S
            with self._lock:
                self._ticked = True
                self._signal()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer SIGINT to the end of the block, and suppress other handlers' errors.

        User code in an inner `armed` or `limited` block is interrupted at once, and the
        interrupt is raised again at the end of this block. In a thread other than the
        main thread, which receives no signals, this does nothing.
        """
        armed, handler = self._armed, handler_of(signal.SIGINT)
        in_main = threading.get_ident() == self._main_thread
        if handler is None or not in_main:
            yield
            return
        self._deferring = True
        self._arm(False)
        self._take()
        try:
            yield
        finally:
            self._deferring = False
            self._arm(armed)
            signal.signal(signal.SIGINT, handler)
            if armed and self._pending:
                self._pending = False
                signal.raise_signal(signal.SIGINT)

    def _insist(self, request: str) -> None:
        """Repeat the signal until the handler has run.

        A signal may arrive after Python's last check for signals and before a system
        call. It then does not end the call, which may block forever.
        """
        pause = Event()
        for _ in range(INSIST_TIMES):
            pause.wait(INSIST_S)
            with self._lock:
                if self._heard or self._request != request:
                    return
                self._signal()

    def _signal(self) -> None:
        if hasattr(signal, "pthread_kill"):
            # Sent to the main thread, so that a system call in it returns.
            signal.pthread_kill(self._main_thread, signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.SIGINT)

    def _on_unraisable(self, dropped: Any) -> None:
        """Repeat an interrupt that Python drops because a destructor raised it.

        It is raised where the destructor was called.
        """
        if dropped.exc_type is KeyboardInterrupt:
            _ = -REPEAT
        elif dropped.exc_type is Overdue:
            pass  # `_tick` raises it again
        else:
            self._unraisable(dropped)

    def _awaits_import(self, frame: FrameType | None) -> bool:
        """Whether an interrupt has to wait for the end of an import.

        Python removes a module whose import is cut, but leaves its submodules. When it
        is imported again, it lacks the attributes that name these. An import that does
        not end is cut, and the submodules are removed as well. Others still refer to
        them, so that this does not mend every package.
        """
        cut = _imports(frame)
        if cut is None:
            self._import = None
            return False
        if self._import is None:
            self._import = _Import()
        if self._import.proceeds():
            return True
        self._import = None
        for name in [*sys.modules]:
            if any(name.startswith(f"{each}.") for each in cut):
                del sys.modules[name]
        return False

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        if is_entering(frame):
            _ = -REPEAT
            return
        if self._heard and (self._ticked or self._overdue > MOST_CAUGHT):
            self._ticked = False
            if self._deadline is not None and time.monotonic() >= self._deadline:
                if frame is not None and frame.f_code.co_filename in AROUND_BLOCKS:
                    return  # the block ends now, and its end must be whole
                if self._awaits_import(frame):
                    return  # `_tick` repeats the signal
                self._overdue += 1
                if self._overdue > MOST_CAUGHT:
                    # A loop with `except BaseException` spends its time within the
                    # `try`, where each Overdue is caught. The next one comes in the
                    # handler, or between two rounds.
                    overdue = Overdue()
                    _ = -REPEAT
                    raise overdue
                raise Overdue
            return
        if self._armed and self._awaits_import(frame):
            if self._heard:  # a signal of the user's own, which nothing repeats
                self._heard = False
                # Thread.start() would wait for the thread, in a signal's handler.
                _thread.start_new_thread(self._insist, (self._request,))
            return
        self._heard = True
        self._pending |= not self._armed or self._deferring
        if self._armed:
            self._deliver(self._waiting, frame)

    def _deliver(
        self, task: asyncio.Task[object] | None, frame: FrameType | None = None
    ) -> None:
        self.delivered = True
        if task is None:
            raise KeyboardInterrupt
        loop = task.get_loop()
        if asyncio.current_task(loop) is task:
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(task.cancel)
        if _in_cell(frame):
            # The cell has made the current task. KeyboardInterrupt would end the event
            # loop. CancelledError ends this task, and the loop then cancels the cell's.
            raise asyncio.CancelledError


def _handlers() -> dict[signal.Signals, Handler]:
    """The Python handlers that are installed for `USERS_SIGNALS`."""
    handlers = {signum: handler_of(signum) for signum in USERS_SIGNALS}
    return {signum: each for signum, each in handlers.items() if callable(each)}


def _in_cell(frame: FrameType | None) -> bool:
    """Whether a cell's code is on the stack."""
    while frame is not None:
        if cell_of(frame.f_code.co_filename) is not None:
            return True
        frame = frame.f_back
    return False


def _imports(frame: FrameType | None) -> list[str] | None:
    """The modules whose code runs below an import; None if there is no import."""
    names, found = [], False
    while frame is not None:
        if frame.f_code.co_filename == IMPORTLIB:
            found = True
            if frame.f_code.co_name == "_load_unlocked":
                names.append(frame.f_locals["spec"].name)
        frame = frame.f_back
    return names if found else None
