"""Tells a notebook's server that the kernel is in use while it runs no cell.

A server can end a kernel that is idle, and a hub the server of an idle user. The time
of the last activity decides, which is that of the kernel's last message.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from IPython.core.getipython import get_ipython

from nbdist.ipc.locks import Event

__all__ = ["kept_active"]

ACTIVITY = "nbdist_activity"
"""A type of message that servers count as activity, and front ends ignore. It has no
parent, so that it belongs to no cell's output."""
PERIOD_S = 60.0
"""Seconds between two messages: far below every usual limit of idle time."""


@contextmanager
def kept_active() -> Iterator[None]:
    """Publish the kernel's activity while the block runs; nothing outside a kernel."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        yield
        return
    ended = Event()

    def publish() -> None:
        while not ended.wait(PERIOD_S):
            kernel.session.send(kernel.iopub_socket, ACTIVITY, {})

    threading.Thread(target=publish, name="nbdist-activity", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
