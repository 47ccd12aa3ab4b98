"""The clock of time-outs, which stands still while the user is at a debugger's prompt.

A rank that waits for a rank at a prompt would otherwise time out while the user thinks.
"""

from __future__ import annotations

import threading
import time

__all__ = ["hold", "now"]

_lock = threading.Lock()
_held_s = 0.0
"""Seconds for which the clock has stood still before `_since`."""
_since: float | None = None
"""When it was stopped, on the monotonic clock; None while it runs."""


def now() -> float:
    """Seconds, as `time.monotonic` without the time for which the clock was held."""
    held_s, since = _held_s, _since
    return (time.monotonic() if since is None else since) - held_s


def hold(held: bool) -> None:
    """Stop the clock, or let it run on. Another thread than that which waits calls."""
    global _held_s, _since
    with _lock:
        if held and _since is None:
            _since = time.monotonic()
        elif not held and _since is not None:
            # In this order: a thread that reads in between sees a time that has passed.
            _held_s, _since = _held_s + time.monotonic() - _since, None
