"""Runs a function in a forked process, with a deadline.

A fork starts at once with every module that the parent has imported. What the function
does to its process, such as a crash, a hang or a changed module, ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import selectors
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbdist.ipc.prctl import die_with_parent

__all__ = ["Ended", "Forked", "call", "first_ended"]

TEXT_BYTES = 6000
"""How much of a process's output is kept."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    value: Any
    """What the function returned; None if it did not return."""
    failure: str | None
    """Why it did not return: the traceback, the signal or the deadline."""
    text: str
    """The end of what the process printed."""


class Forked:
    """A process that runs a function. `wait` must be called, and ends it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        # Killed processes leave files behind. They are in this folder.
        self._folder = tempfile.mkdtemp(prefix="nb")
        self._output = Path(self._folder) / "output"
        self._answer = Path(self._folder) / "answer"
        self._used = Path(self._folder) / "used"
        self.pid = os.fork()
        if self.pid == 0:
            self._run(function)
        self._pidfd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process ends."""
        return self._pidfd

    def used(self) -> bool:
        """Whether it made the file that $NBDIST_UPSTREAM_USED names."""
        return self._used.exists()

    def wait(self, deadline_s: float) -> Ended:
        """Wait for the end. At the deadline the process and its children are killed."""
        is_late = not _readable(self._pidfd, deadline_s)
        if is_late:
            os.kill(self.pid, signal.SIGABRT)  # faulthandler prints the stacks
            _readable(self._pidfd, 2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it has started
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._pidfd)
        text = self._output.read_bytes()[-TEXT_BYTES:].decode(errors="replace")
        value, failure = None, f"the process ended with exit code {code}"
        if self._answer.exists():
            value, failure = pickle.loads(self._answer.read_bytes())
        elif is_late:
            failure = f"no end after {deadline_s:.0f} s"
        shutil.rmtree(self._folder, ignore_errors=True)
        return Ended(value, failure, text)

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            os.setsid()
            die_with_parent()
            atexit._clear()  # type: ignore[attr-defined] # the parent's
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            output = os.open(self._output, flags, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            faulthandler.enable(2)
            os.environ["TMPDIR"] = tempfile.tempdir = self._folder
            os.environ["NBDIST_UPSTREAM_USED"] = str(self._used)
            answer: tuple[Any, str | None]
            try:
                answer = function(), None
            except BaseException:  # noqa: BLE001 - it is the answer
                answer = None, traceback.format_exc()
            partial = self._answer.with_suffix(".part")
            partial.write_bytes(pickle.dumps(answer))
            partial.rename(self._answer)
        finally:
            os._exit(0)


def call(function: Callable[[], Any], deadline_s: float) -> Ended:
    """Run a function in a forked process."""
    return Forked(function).wait(deadline_s)


def first_ended(processes: list[Forked], deadline_s: float) -> Forked | None:
    """The process that ends first; None if none ends within the deadline."""
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process, selectors.EVENT_READ)
        ready = selector.select(deadline_s)
    found = ready[0][0].fileobj if ready else None
    assert found is None or isinstance(found, Forked)
    return found


def _readable(descriptor: int, timeout_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        end = time.monotonic() + timeout_s
        while not selector.select(max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                return False
    return True
