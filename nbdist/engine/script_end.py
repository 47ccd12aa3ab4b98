"""How a rank without a notebook ends: by itself if all is well, else with all others.

MPI's orderly end waits for every rank. One that fails must not wait there, for the
others may be waiting for it in a collective, and the job would stand for ever.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from nbdist.engine.torchrun_bootstrap import is_borrowed

__all__ = ["end_together"]

_status = 0
"""The exit code that this process ends with, once that is known."""


def end_together() -> None:
    """From now on all ranks end when this one fails: by an error, or `sys.exit(code)`.

    torchrun ends the others by itself. A `raise SystemExit(code)` is not seen.
    """
    sys.excepthook = partial(_end_by_error, sys.excepthook)
    sys.exit = _exit
    atexit.register(_end_by_status, os.getpid())


def _end_by_error(
    show: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show what this rank failed with, and end."""
    show(kind, error, trace)
    _end(1)


def _end_by_status(pid: int) -> None:
    if _status and os.getpid() == pid:  # not in a child that was forked
        _end(_status)


def _end(status: int) -> NoReturn:
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    if not is_borrowed():
        MPI.COMM_WORLD.Abort(status)
    os._exit(status)


class _Exit(SystemExit):
    """Notices when it is Python itself that asks for the code, to end with it.

    Whoever catches it asks from a frame of Python; of Python's own end there is none.
    """

    def __getattribute__(self, name: str) -> Any:
        global _status
        value = super().__getattribute__(name)
        if name == "code" and sys._getframe().f_back is None:
            _status = value if isinstance(value, int) else int(value is not None)
        return value


def _exit(status: Any = None, /) -> NoReturn:
    """In place of `sys.exit`."""
    if threading.current_thread() is threading.main_thread():
        raise _Exit(status)
    raise SystemExit(status)  # ends the thread, silently only if it is of this class
