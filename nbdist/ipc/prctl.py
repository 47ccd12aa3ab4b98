"""Linux's prctl: ending with the parent, adopting orphans. No effect elsewhere."""

from __future__ import annotations

import ctypes
import signal
import sys

__all__ = ["adopt_orphans", "die_with_parent"]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
