"""How `multiprocessing` starts the worker processes of a rank.

A rank forks them, unless the user chooses another method: a forked worker has all that
the cells have defined. From Python 3.14 on, Python's own default is a fork server.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, forkserver
from typing import Any

__all__ = ["prefer_fork", "pythons_own"]

_chooser: Any = context._default_context
_PYTHONS = _chooser._default_context


def prefer_fork() -> None:
    """Make "fork" the default. The user can still choose another method, once."""
    if sys.platform == "linux":
        _chooser._default_context = _chooser.get_context("fork")


@contextmanager
def pythons_own() -> Iterator[None]:
    """Within this block, begin as a new process: with Python's default, and no choice.

    A process can choose its method once, and its fork server keeps the script that was
    `__main__` first. What was there before is there again at the end.
    """
    chosen = _chooser._default_context, _chooser._actual_context
    _chooser._default_context, _chooser._actual_context = _PYTHONS, None
    server: Any = forkserver._forkserver
    before = dict(vars(server))
    vars(server).update(vars(forkserver.ForkServer()))
    try:
        yield
    finally:
        if server._forkserver_pid is not None:
            os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()
        vars(server).update(before)
        _chooser._default_context, _chooser._actual_context = chosen
