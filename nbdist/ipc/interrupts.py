"""Signal handlers, and interrupts that are deferred during work."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["defer_interrupts", "handler_of", "set_handler"]


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
