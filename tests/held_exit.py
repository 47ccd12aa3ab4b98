"""Holds the exit of a process, as the system does that gives back much memory."""

from __future__ import annotations

import ctypes
import os
import threading

SEIZE, CONT, DETACH = 0x4206, 7, 17
TRACE_EXIT = 0x40
WALL = 0x40000000
EXIT_STOP = 6


class HeldExit:
    """Traces the main thread of a process, which ends only after `release`.

    Raises:
        PermissionError: The system does not let this process trace the other one.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seized, self._released = threading.Event(), threading.Event()
        self._errno = 0
        # The thread that seizes a process is the only one that may let it go.
        self._thread = threading.Thread(target=self._trace, daemon=True)
        self._thread.start()
        self._seized.wait()
        if self._errno:
            raise PermissionError(self._errno, os.strerror(self._errno))

    def release(self) -> None:
        """Let the process end. A second call does nothing."""
        self._released.set()

    def _trace(self) -> None:
        ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        if ptrace(SEIZE, self._pid, None, TRACE_EXIT) != 0:
            self._errno = ctypes.get_errno()
        self._seized.set()
        while not self._errno:
            try:
                _, status = os.waitpid(self._pid, WALL)
            except ChildProcessError:
                return
            if not os.WIFSTOPPED(status):
                return
            if status >> 16 == EXIT_STOP:
                self._released.wait()
                ptrace(DETACH, self._pid, None, None)
            else:
                ptrace(CONT, self._pid, None, os.WSTOPSIG(status))
