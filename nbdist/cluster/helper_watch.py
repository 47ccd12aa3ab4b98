"""Watching the helper processes of a cluster: one that is stopped is continued."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable

import psutil

__all__ = ["HelperWatch"]

LOOK_S = 0.5


class HelperWatch:
    """Looks twice a second, from a thread of its own.

    A process that has ended is its parent's to report; one that is stopped (SIGSTOP) is
    reported by nobody.

    Args:
        on_note: Hears that a process was stopped and has been continued.
    """

    def __init__(self, on_note: Callable[[str], None]) -> None:
        self._on_note = on_note
        self._helpers: dict[str, psutil.Process] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="nbdist-helper-watch", daemon=True
        )
        self._thread.start()

    def add(self, name: str, pid: int) -> None:
        """Watch a process. One that has ended already is no error."""
        with contextlib.suppress(psutil.NoSuchProcess), self._lock:
            self._helpers[name] = psutil.Process(pid)

    def close(self) -> None:
        """Stop watching. A second close is harmless."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            with self._lock:
                helpers = dict(self._helpers)
            for name, process in helpers.items():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._look(name, process)

    def _look(self, name: str, process: psutil.Process) -> None:
        if process.status() == psutil.STATUS_STOPPED:
            process.send_signal(signal.SIGCONT)
            self._on_note(
                f"{name} (pid {process.pid}) was stopped, and has been continued: the "
                "ranks cannot do without it"
            )
