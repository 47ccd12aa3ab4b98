"""A rank's parent process, which sees how the rank ends and says so.

Open MPI tells the survivors of a process that a signal has ended, but not of one that
has left with an exit code, and they would wait for that one for ever. And no launcher
tells the notebook the code. So each rank is the child of a process that does nothing
but wait: it writes the end down, and ends by a signal itself unless all was well.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from nbdist.engine.lifeline import die_with_parent

__all__ = ["ending_of", "go_on_in_child"]

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def go_on_in_child(ending: Path) -> None:
    """Return in a child process; this one stays to write how the child ends.

    Call it before anything is imported that a fork would copy.
    """
    child = os.fork()
    if child == 0:
        die_with_parent()
        return
    for signum in FORWARDED:
        signal.signal(signum, lambda number, _frame: _pass_on(child, number))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(FileNotFoundError):  # the cluster is gone already
        ending.write_text(str(code))
    if code != 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


def ending_of(ending: Path) -> str | None:
    """How a rank has ended, in words; None when nothing was written (yet)."""
    if not ending.exists() or not (text := ending.read_text()):
        return None
    code = int(text)
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _pass_on(child: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signum)
