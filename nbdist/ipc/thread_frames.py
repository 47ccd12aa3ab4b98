"""The frames of a thread, for another thread of the process.

Python 3.11 makes a frame's object when it is first asked for. If that memory makes it
collect garbage, and a finalizer lets other threads run, the thread has left the frame
when the object is made: one gets another object's memory, or a crash (see the comment
on GH-97002 in CPython's Python/frame.c). Therefore nothing is collected meanwhile.
Python 3.10 makes these objects with the calls, and later ones collect between two
instructions only.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

__all__ = ["frames_of", "take_locals"]

A = TypeVar("A")
T = TypeVar("T")

_MAKES_LATE = sys.version_info[:2] == (3, 11)
_paused = threading.RLock()
# A child process is not forked between the two calls of gc below.
os.register_at_fork(
    before=_paused.acquire,
    after_in_parent=_paused.release,
    after_in_child=_paused.release,
)


def frames_of(thread: int) -> list[FrameType]:
    """A thread's frames, innermost first; none if it has ended.

    While the list is kept, following `f_back` from its frames is safe, too.

    Args:
        thread: Its identifier, as `threading.get_ident` returns it.
    """
    return _without_collection(_frames_of, thread)


def take_locals(frame: FrameType) -> dict[str, Any]:
    """The local variables of a function's call, which may be that of another thread."""
    return _without_collection(_take_locals, frame)


def _frames_of(thread: int) -> list[FrameType]:
    frames = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _take_locals(frame: FrameType) -> dict[str, Any]:
    variables = frame.f_locals
    taken = dict(variables)
    if isinstance(variables, dict):  # before Python 3.13, the frame keeps this copy
        variables.clear()
    return taken


def _without_collection(read: Callable[[A], T], argument: A) -> T:
    with _paused:  # not within a generator, which an interrupt would leave suspended
        was_enabled = _MAKES_LATE and gc.isenabled()
        try:
            if was_enabled:
                gc.disable()
            return read(argument)
        finally:
            if was_enabled:
                gc.enable()
