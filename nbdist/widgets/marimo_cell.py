"""The end of what a cell of marimo has made.

marimo deletes the variables of a cell before it runs the cell again, and forgets a
session whose page was closed. A cluster and a monitor have threads, which would go on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["end_with_cell", "in_marimo"]


class _Item:
    """Has the methods of marimo's `CellLifecycleItem`."""

    def __init__(self, end: Callable[[], None], session: set[_Item]) -> None:
        self.end = end
        self._session = session

    def create(self, context: object) -> None:
        self._session.add(self)

    def dispose(self, context: object, deletion: bool) -> bool:
        self._session.discard(self)
        self.end()
        return True


_sessions: dict[threading.Thread, set[_Item]] = {}
"""What the cells of each session have made, by the thread that runs the cells."""


def end_with_cell(end: Callable[[], None]) -> None:
    """Call `end()` when marimo runs the cell that runs now again, or deletes it.

    `marimo run` has a thread for each session, and `end` is also called when it ends.
    Elsewhere than in a cell of marimo, this function does nothing.
    """
    context = _context()
    if context is not None:
        context.cell_lifecycle_registry.add(_Item(end, _session_of_this_thread()))


def in_marimo() -> bool:
    """Whether this thread runs a cell of marimo, where text and displays are apart."""
    return _context() is not None


def _context() -> Any:
    if "marimo" not in sys.modules:
        return None
    from marimo._runtime.context import safe_get_context

    return safe_get_context()


def _session_of_this_thread() -> set[_Item]:
    thread = threading.current_thread()
    if thread not in _sessions:
        _sessions[thread] = set()
        if thread is not threading.main_thread():
            threading.Thread(target=_follow, args=(thread,), daemon=True).start()
    return _sessions[thread]


def _follow(thread: threading.Thread) -> None:
    thread.join()
    for item in _sessions.pop(thread):
        item.end()
