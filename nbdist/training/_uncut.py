"""Work that an interrupt must not leave halfway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncut"]


@contextmanager
def uncut() -> Iterator[None]:
    """Within, hold an interrupt (SIGINT) back; it comes at the end.

    For moments, not for anything that waits. In other threads than the main one, where
    no interrupt comes, it does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if handler is None or not in_main:  # None: of C code
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
