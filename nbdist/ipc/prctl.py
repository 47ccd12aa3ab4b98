"""Tying a process's life to its parent's. Linux can; elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import signal
import sys

__all__ = ["adopt_orphans", "die_with_parent"]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """Have this process sent a signal when the one that started it ends."""
    _prctl(PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Become the parent of every process below us whose own parent dies."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
