"""Signal handlers, and interrupts that are deferred during work."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import opcode
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = [
    "REPEAT",
    "defer_interrupts",
    "handler_of",
    "interrupt",
    "is_entering",
    "set_handler",
    "spare_entries",
]

_LOAD_SPECIAL = opcode.opmap.get("LOAD_SPECIAL")
"""Python 3.14's instruction before the call of `__enter__`."""


class _Repeat:
    """The operator `-` makes the handler of SIGINT run when the caller goes on.

    Python looks for signals after each call, but not after an operator.
    """

    __neg__: Any = _thread.interrupt_main


REPEAT = _Repeat()


def is_entering(frame: FrameType | None) -> bool:
    """Whether a `with` statement has called `__enter__`, and not begun its block.

    Python 3.14 runs signal handlers there (python/cpython#148874). An error that a
    handler raised would leave a lock held, so it should do `-REPEAT` and return.
    """
    if frame is None or _LOAD_SPECIAL is None or frame.f_lasti < 2:
        return False
    return frame.f_code.co_code[frame.f_lasti - 2] == _LOAD_SPECIAL


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt as `signal.default_int_handler` does, but not there."""
    if is_entering(frame):
        _ = -REPEAT
    else:
        signal.default_int_handler(signum, frame)


def spare_entries() -> None:
    """Use `interrupt` instead of Python's own handler, where that may leave locks held.

    ipykernel sets Python's handler for each cell. In a thread other than the main
    thread, which cannot set a handler, this only changes what ipykernel sets.
    """
    if _LOAD_SPECIAL is None:
        return
    in_main = threading.get_ident() == threading.main_thread().ident
    if in_main and handler_of(signal.SIGINT) is signal.default_int_handler:
        set_handler(signal.SIGINT, interrupt)
    kernelbase: Any = sys.modules.get("ipykernel.kernelbase")
    if kernelbase is not None:
        kernelbase.default_int_handler = interrupt


def handler_of(signum: int) -> Any:
    """The handler of a signal: a callable; a number for SIG_DFL or SIG_IGN; or None for
    one of C code.

    `signal.getsignal` looks for a member of an enumeration first, which takes a hundred
    times as long.
    """
    return _signal.getsignal(signum)


def set_handler(signum: int, handler: Any) -> None:
    """Set the handler of a signal, as `handler_of` returns it.

    Like `handler_of`, this does without the enumeration that `signal.signal` looks in.
    """
    _signal.signal(signum, handler)


@contextmanager
def defer_interrupts(on_interrupt: Callable[[], None] | None = None) -> Iterator[None]:
    """Defer an interrupt (SIGINT) to the end of the `with` block.

    The interrupt is also delivered if the block raises. In a thread other than the main
    thread, which receives no interrupt, this does nothing.

    Args:
        on_interrupt: Called by the signal handler at each interrupt, for instance to
            make a long block end soon. It must not acquire a lock that the block may
            hold.
    """
    handler = handler_of(signal.SIGINT)
    in_main = threading.get_ident() == threading.main_thread().ident
    if handler is None or not in_main:
        yield
        return
    came = False

    def remember(_number: int, _frame: object) -> None:
        nonlocal came
        came = True
        if on_interrupt is not None:
            on_interrupt()

    set_handler(signal.SIGINT, remember)
    try:
        yield
    finally:
        set_handler(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
