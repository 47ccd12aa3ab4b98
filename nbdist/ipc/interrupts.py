"""Defers interrupts during work that must be completed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["defer_interrupts"]


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
    handler = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if handler is None or not in_main:  # None: a handler of C code
        yield
        return
    came = False

    def remember(_number: int, _frame: object) -> None:
        nonlocal came
        came = True
        if on_interrupt is not None:
            on_interrupt()

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
