"""Reads the start-up status of a rank's process from the files that it writes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from nbdist.ipc import pidfd
from nbdist.ipc.process_files import process_name, read_exit_report
from nbdist.ipc.torch_noise import without_noise

__all__ = [
    "ProcessExit",
    "StartupStatus",
    "ends_within",
    "is_stopped",
    "runs",
    "tail_of",
]

TAIL_LINES = 12
END_POLL_S = 0.01
EXIT_REPORT_TIMEOUT_S = 0.5
"""Seconds that the parent of a rank that has ended may take to report its exit."""


class ProcessExit(NamedTuple):
    """The end of a process."""

    how: str
    """How it ended, such as "exit code 1" or "SIGKILL"."""
    last_lines: str
    """The end of its standard error."""

    @property
    def ending(self) -> str:
        """The last lines, with a heading; "" if the process has written no line."""
        return self.last_lines and f"\nits last lines:\n{self.last_lines}"


class StartupStatus:
    """The start of one rank's process, until it has registered with the controller.

    Args:
        run_dir: The cluster's run folder.
        rank, generation: Identify the process; see `nbdist.ipc.process_files`.
    """

    def __init__(self, run_dir: Path, rank: int, generation: int = 0) -> None:
        self.rank = rank
        self._path = run_dir / process_name(rank, generation)
        self._gone_since: float | None = None

    @property
    def stage(self) -> str | None:
        """The process's stage of the start; None if it has not begun."""
        record = self._record()
        return None if record is None else record["stage"]

    @property
    def failure(self) -> ProcessExit | None:
        """The error that the process has reported; None if there is none."""
        path = self._path.with_suffix(".failed")
        if not path.exists():
            return None
        return ProcessExit("exit code 1", tail_of(path.read_text(errors="replace")))

    def end(self) -> ProcessExit | None:
        """The end of the process; None while it runs.

        A rank that was killed together with its parent is noticed within a second.
        """
        how = read_exit_report(self._path.parent, self._path.name)
        if how is None and self._is_gone():
            how = "an unknown exit code (its parent process has ended too)"
        return self.failure or (how and ProcessExit(how, self.last_lines())) or None

    def refuse(self) -> None:
        """End the process now, or as soon as it begins, without waiting."""
        with contextlib.suppress(FileNotFoundError):  # the cluster has ended
            self._path.with_suffix(".refused").touch()
        record = self._record()
        if record is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.kill(record["pid"], signal.SIGKILL)

    def last_lines(self) -> str:
        """The end of the process's standard error."""
        path = self._path.with_suffix(".stderr")
        return tail_of(path.read_text(errors="replace")) if path.exists() else ""

    def _record(self) -> dict[str, Any] | None:
        path = self._path.with_suffix(".stage")
        return json.loads(path.read_text()) if path.exists() else None

    def _is_gone(self) -> bool:
        """Whether it has ended without a report from its parent process."""
        record = self._record()
        if record is None or runs(record["pid"]):
            self._gone_since = None
            return False
        self._gone_since = self._gone_since or time.monotonic()
        return time.monotonic() > self._gone_since + EXIT_REPORT_TIMEOUT_S


def tail_of(text: str) -> str:
    """The last lines of a text, as many as an error message shows."""
    return "\n".join(without_noise(text).rstrip().splitlines()[-TAIL_LINES:])


def runs(pid: int) -> bool:
    """Whether a process exists. A stopped process exists, a zombie does not."""
    return _status(pid) not in (None, psutil.STATUS_ZOMBIE)


def is_stopped(pid: int) -> bool:
    """Whether a process exists and is stopped, as SIGSTOP stops it."""
    return bool(_status(pid) == psutil.STATUS_STOPPED)


def _status(pid: int) -> str | None:
    """psutil's status of a process; None if it does not exist."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return None


def ends_within(pid: int, timeout_s: float) -> bool:
    """Wait until a process, which need not be a child, has ended; whether it has."""
    try:
        descriptor = pidfd.opened(pid)
    except ProcessLookupError:
        return True
    if descriptor is None:
        end = time.monotonic() + timeout_s
        while runs(pid) and time.monotonic() < end:
            time.sleep(END_POLL_S)
        return not runs(pid)
    try:
        return pidfd.ends_within(descriptor, timeout_s)
    finally:
        os.close(descriptor)
