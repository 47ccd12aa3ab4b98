"""Where a rank's Python was when a signal has ended its process.

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
"""How `faulthandler` names the signals that it handles, by Python's version."""
TITLE = "Fatal Python error: "
THREAD = re.compile(
    r"(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):"
)
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
MOST_LINES = 20
WITHOUT_USER_CODE = 5
"""The number of frames that are shown where none is the user's."""


@dataclass(frozen=True)
class Crash:
    """What a rank's Python did when a signal has ended the process."""

    location: str
    """The user's innermost line, such as "In[7] line 4" or "train.py line 4"; "" where
    no code of the user's ran."""
    stack: str
    """The calls from the user's code on, the innermost last."""


def find_crash(text: str, ending: str) -> Crash | None:
    """The crash that a rank's standard error ends with; None where there is none.

    Args:
        ending: How the rank has ended, such as "SIGSEGV". A child of the rank may have
            crashed before, in another way.
    """
    titles = TITLES.get(ending, ())
    start = max((text.rfind(TITLE + title) for title in titles), default=-1)
    if start < 0:
        return None
    threads = _threads(text[start:].splitlines())
    # Foreign code may have crashed in a thread without Python, such as autograd's.
    # What the main thread was doing then comes next.
    for frames in threads:
        if own := from_user_code(frames):
            script = own[0].file
            lines = [f for f in own if f.cell is not None or f.file == script]
            return Crash(lines[-1].location, _stack(own))
    return next((Crash("", _stack(f[-WITHOUT_USER_CODE:])) for f in threads if f), None)


def _threads(lines: Sequence[str]) -> list[list[Frame]]:
    """The frames of each thread, outermost first: of the thread that the signal has
    hit, of the main thread, and of the others."""
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
    return [*hit, *reversed(others)]  # the main thread is the oldest, thus the last


def _stack(frames: Sequence[Frame]) -> str:
    left_out = len(frames) - MOST_LINES
    head = [f"  ({left_out} calls are left out)"] if left_out > 0 else []
    return "\n".join([*head, *map(str, frames[-MOST_LINES:])])
