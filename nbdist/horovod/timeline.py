"""The timeline: a trace of a rank's calls, in the Trace Event Format.

Perfetto and chrome://tracing show the file. Each call is a row with two spans: the time
from its submission until all ranks have made it, and the time in which the data move.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from nbdist.errors import UsageError
from nbdist.horovod.negotiation import Request

__all__ = ["Timeline", "running", "start", "stop"]

_running: Timeline | None = None


def running() -> Timeline | None:
    """The timeline that is being written by this process."""
    return _running


def start(path: Path, *, mark_cycles: bool) -> None:
    """Write a timeline to this file from now on. One that is being written ends.

    Raises:
        UsageError: The file cannot be written.
    """
    global _running
    stop()
    _running = Timeline(path, mark_cycles=mark_cycles)


def stop() -> None:
    """End the timeline that is being written. Safe to call without one."""
    global _running
    timeline, _running = _running, None
    if timeline is not None:
        timeline.close()


class Timeline:
    """Writes events to a file, one per line. Any thread may call its methods.

    The list of a process that was killed lacks its end, which viewers accept.
    """

    def __init__(self, path: Path, *, mark_cycles: bool) -> None:
        try:
            self._file: IO[str] = path.open("w", buffering=1)
        except OSError as error:
            raise UsageError(f"timeline: {path} cannot be written: {error}") from error
        self._marks_cycles = mark_cycles
        self._lock = threading.Lock()
        self._begin_ns = time.perf_counter_ns()
        self._rows: defaultdict[str, int] = defaultdict(itertools.count(1).__next__)
        """The number of each call's row. Row 0 has the marks."""
        self._file.write("[\n")
        epoch_us = time.time_ns() // 1000
        self._write("M", "start_time_since_epoch_in_micros", 0, args={
            "start_time_since_epoch_in_micros": epoch_us
        })  # fmt: skip

    def call(self, request: Request) -> Call:
        """The record of a call that is about to be made."""
        return Call(self, request)

    def mark_cycle(self) -> None:
        """Record that a rank's coordinator has begun a turn."""
        if self._marks_cycles:
            now = time.perf_counter_ns()
            with self._lock:
                self._write("i", "CYCLE_START", 0, now, s="g")

    def close(self) -> None:
        """End the list, and close the file. Later events are not written."""
        with self._lock:
            self._file.write('{"name": "end", "ph": "M", "pid": 0, "tid": 0}\n]\n')
            self._file.close()

    def spans(
        self, request: Request, made_ns: int, end_ns: int, error: str | None
    ) -> None:
        """Write the two spans of a call.

        Args:
            made_ns, end_ns: When all ranks had made the call, and its end.
            error: What the call has raised.
        """
        name, kind, submitted_ns = request.name, request.kind, request.submitted_ns
        args = {"dtype": kind.dtype, "shape": str(list(kind.shape))}
        if error is not None:
            args["error"] = error
        operation = kind.operation.partition("[")[0].upper()
        with self._lock:
            if name not in self._rows:
                self._write("M", "process_name", self._rows[name], args={"name": name})
            row = self._rows[name]
            waits = made_ns - submitted_ns
            self._write("X", f"NEGOTIATE_{operation}", row, submitted_ns, waits, args)
            self._write("X", operation, row, made_ns, end_ns - made_ns, args)

    def _write(
        self,
        phase: str,
        name: str,
        row: int,
        begin_ns: int | None = None,
        length_ns: int | None = None,
        args: dict[str, Any] | None = None,
        **more: str,
    ) -> None:
        if self._file.closed:
            return
        event: dict[str, Any] = {"name": name, "ph": phase, "pid": row, "tid": 0}
        if begin_ns is not None:
            event["ts"] = (begin_ns - self._begin_ns) / 1e3
        if length_ns is not None:
            event["dur"] = length_ns / 1e3
        if args is not None:
            event["args"] = args
        self._file.write(f"{json.dumps(event | more)},\n")


class Call:
    """The record of one call."""

    def __init__(self, timeline: Timeline, request: Request) -> None:
        self._timeline, self._request = timeline, request
        self._made_ns: int | None = None

    def timed(self, body: Callable[[], object]) -> Callable[[], object]:
        """The body of the call, which also notes that all ranks have made the call."""

        def noted() -> object:
            self._made_ns = time.perf_counter_ns()
            return body()

        return noted

    def end(self, error: BaseException | None) -> None:
        """Write the call."""
        now_ns = time.perf_counter_ns()
        made_ns = now_ns if self._made_ns is None else self._made_ns
        text = None if error is None else f"{type(error).__name__}: {error}"
        self._timeline.spans(self._request, made_ns, now_ns, text)
