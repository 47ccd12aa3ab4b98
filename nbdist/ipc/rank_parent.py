"""A rank's parent process, which reports how the rank ends.

The MPI launcher starts this program; it starts the rank and waits for it. Then it
writes the exit code to the exit report, for no launcher tells the notebook the code.
Open MPI tells the survivors of a process that a signal has ended, but not of one that
has left with an exit code: they would wait for it without end. So unless the code is
0, this program ends itself by a signal.

It runs without Python's `site`. What breaks there breaks the rank alone, and is
reported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder that nbdist can be imported from."""

if __name__ == "__main__":
    # This file's folder would hide modules of the standard library.
    sys.path[0:1] = []
    sys.path.append(str(ROOT))

from nbdist.ipc.prctl import die_with_parent  # noqa: E402 - once it is found
from nbdist.ipc.process_files import Process  # noqa: E402

__all__ = ["command"]

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def command(*arguments: str) -> list[str]:
    """The command line of a rank: what the MPI launcher starts."""
    return [sys.executable, "-S", __file__, *arguments]


def main(arguments: list[str]) -> None:
    """Start the rank, wait until it has ended, and report its exit."""
    die_with_parent()
    process = Process.of_arguments(arguments)
    process.report_stage("starting Python")
    if process.is_refused:
        os._exit(0)
    process.reserve_exit_report()
    child = os.fork()
    if child == 0:
        _become_rank(process, arguments)
    for signum in FORWARDED:
        signal.signal(signum, lambda number, _frame: _pass_on(child, number))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    process.report_exit(code)
    if code != 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _become_rank(process: Process, arguments: list[str]) -> None:
    """In the child: run the rank, which ends when this program ends."""
    die_with_parent()
    _capture_descriptors(process)
    os.chdir(ROOT)
    rank = [sys.executable, "-m", "nbdist.engine", *arguments]
    os.execv(sys.executable, rank)


def _capture_descriptors(process: Process) -> None:
    """Redirect descriptors 1 and 2 to files, and descriptor 0 from /dev/null.

    The files take what C code and child processes write, too. `input()` fails at once,
    for nobody can answer it.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for descriptor, path in enumerate(process.captured.values(), start=1):
        target = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(target, descriptor)
        os.close(target)


def _pass_on(child: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signum)


if __name__ == "__main__":
    main(sys.argv[1:])
