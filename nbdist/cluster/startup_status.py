"""A rank on its way up, as the files that it writes show it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from nbdist.ipc.process_files import process_name, read_exit_report

__all__ = ["Arrival", "End", "runs", "tail_of"]

TAIL_LINES = 12
EXIT_REPORT_TIMEOUT_S = 0.5
"""Seconds that the parent of a rank that has ended may take to report its exit."""


class End(NamedTuple):
    """How a process has ended."""

    how: str
    """Such as "exit code 1", or "SIGKILL"."""
    last_lines: str


class Arrival:
    """One rank's process, from its start until it has registered.

    Args:
        run_dir: the cluster's folder.
        rank, generation: which process it is, as `nbdist.ipc.process_files` counts.
    """

    def __init__(self, run_dir: Path, rank: int, generation: int = 0) -> None:
        self.rank = rank
        self._path = run_dir / process_name(rank, generation)
        self._gone_since: float | None = None

    @property
    def stage(self) -> str | None:
        """What it is doing; None where it has not begun."""
        record = self._record()
        return None if record is None else record["stage"]

    @property
    def failure(self) -> End | None:
        """The error that it has reported."""
        path = self._path.with_suffix(".failed")
        if not path.exists():
            return None
        return End("exit code 1", tail_of(path.read_text(errors="replace")))

    def end(self) -> End | None:
        """How it has ended; None as long as it has not.

        A rank that was killed together with its parent is noticed within a second.
        """
        how = read_exit_report(self._path.parent, self._path.name)
        if how is None and self._is_gone():
            how = "an unknown exit code (its parent process has ended too)"
        return self.failure or (how and End(how, self.last_lines())) or None

    def refuse(self) -> None:
        """End the process, or have it end as soon as it begins. It is not awaited."""
        with contextlib.suppress(FileNotFoundError):  # the cluster has ended
            self._path.with_suffix(".refused").touch()
        record = self._record()
        if record is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.kill(record["pid"], signal.SIGKILL)

    def last_lines(self) -> str:
        """Of its standard error."""
        path = self._path.with_suffix(".stderr")
        return tail_of(path.read_text(errors="replace")) if path.exists() else ""

    def _record(self) -> dict[str, Any] | None:
        path = self._path.with_suffix(".stage")
        return json.loads(path.read_text()) if path.exists() else None

    def _is_gone(self) -> bool:
        """Whether it has ended so long ago that its parent must have ended as well."""
        record = self._record()
        if record is None or runs(record["pid"]):
            self._gone_since = None
            return False
        self._gone_since = self._gone_since or time.monotonic()
        return time.monotonic() > self._gone_since + EXIT_REPORT_TIMEOUT_S


def tail_of(text: str) -> str:
    """The last lines, as many as an error can show."""
    return "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])


def runs(pid: int) -> bool:
    """Whether a process is there, running or stopped."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
