"""Settings of a process in Linux: its end with its parent, its orphans, its name.

On other systems the functions have no effect.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

__all__ = ["adopt_orphans", "die_with_parent", "name_process"]

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Show a name for this process in `ps` and `top`, instead of its command line.

    Args:
        name: The first 15 bytes are the short name. The command line shows as many
            bytes as the original command line had.
    """
    if sys.platform != "linux":
        return
    text = name.encode()
    _prctl(PR_SET_NAME, ctypes.c_char_p(text))
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    if end - begin < 2:  # unknown, or there is no command line
        return
    # If the last byte is not 0, Linux shows the text before the first 0.
    shown = text[: end - begin - 2].ljust(end - begin - 1, b"\0") + b" "
    ctypes.memmove(begin, shown, len(shown))


def _prctl(option: int, value: int | ctypes.c_char_p) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
