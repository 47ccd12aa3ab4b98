"""A rank's parent process, which sees how the rank ends and says so.

Open MPI tells the survivors of a process that a signal has ended, but not of one that
has left with an exit code, and they would wait for that one for ever. And no launcher
tells the notebook the code. So the launcher starts this program, which starts the rank
and does nothing but wait: it writes the end down, and ends by a signal itself unless
all was well. It runs without Python's `site`, so that whatever breaks there breaks the
rank alone, and is seen.
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
    # Not this file's folder, whose modules would stand before those of Python.
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
    """Start the rank, and stay until it has ended."""
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
    """In the child: go on as the rank, which outlives this program by nothing."""
    die_with_parent()
    _capture_descriptors(process)
    os.chdir(ROOT)
    rank = [sys.executable, "-m", "nbdist.engine", *arguments]
    os.execv(sys.executable, rank)


def _capture_descriptors(process: Process) -> None:
    """Send descriptors 1 and 2, also those of C code and child processes, to files.

    Descriptor 0 is at its end: nobody can answer to `input()`, and so it fails at once.
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
