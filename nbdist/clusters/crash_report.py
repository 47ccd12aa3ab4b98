"""The Python stack of a rank whose process a signal has ended.

On such a signal, `faulthandler` writes the Python stack of each thread to the rank's
standard error (`engine/bootstrap.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.ipc.stacks import Frame, from_user_code

__all__ = ["Crash", "find_crash"]

TITLES = {
    "SIGSEGV": ("Segmentation fault",),
    "SIGBUS": ("Bus error",),
    "SIGABRT": ("Aborted",),
    "SIGFPE": ("Floating-point exception", "Floating point exception"),
    "SIGILL": ("Illegal instruction",),
}
"""The names that `faulthandler` gives to signals. They differ between Pythons."""
TITLE = "Fatal Python error: "
THREAD = re.compile(
    r"(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):"
)
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
MOST_LINES = 20
WITHOUT_USER_CODE = 5
"""The number of frames that are shown if no frame is the user's."""


@dataclass(frozen=True)
class Crash:
    """The position of a rank's Python code when a signal ended the process."""

    location: str
    """The user's innermost line, such as "In[7] line 4" or "train.py line 4"; "" if no
    user code ran."""
    stack: str
    """The calls, from the user's code to the innermost call."""


def find_crash(text: str, ending: str) -> Crash | None:
    """The crash at the end of a rank's standard error; None if there is no crash.

    Args:
        text: The standard error.
        ending: How the rank has ended, such as "SIGSEGV". A crash with another signal
            is that of a child of the rank.
    """
    titles = TITLES.get(ending, ())
    start = max((text.rfind(TITLE + title) for title in titles), default=-1)
    if start < 0:
        return None
    threads = _threads(text[start:].splitlines())
    # A thread without Python frames, such as autograd's, may have crashed. Then the
    # main thread's frames are used.
    for frames in threads:
        if own := from_user_code(frames):
            script = own[0].file
            lines = [f for f in own if f.cell is not None or f.file == script]
            return Crash(lines[-1].location, _stack(own))
    return next((Crash("", _stack(f[-WITHOUT_USER_CODE:])) for f in threads if f), None)


def _threads(lines: Sequence[str]) -> list[list[Frame]]:
    """The frames of each thread, outermost first. The thread that crashed comes first,
    the main thread second."""
    hit: list[list[Frame]] = []
    others: list[list[Frame]] = []
    frames: list[Frame] = []
    for line in lines:
        if head := THREAD.match(line):
            frames = []
            (hit if head[1] == "Current thread" else others).append(frames)
        elif match := FRAME.match(line):
            frames.insert(
                0, Frame(match["file"], int(match["line"]), match["function"])
            )
    return [*hit, *reversed(others)]  # the main thread is the oldest, so it is the last


def _stack(frames: Sequence[Frame]) -> str:
    left_out = len(frames) - MOST_LINES
    head = [f"  ({left_out} calls are left out)"] if left_out > 0 else []
    return "\n".join([*head, *map(str, frames[-MOST_LINES:])])
