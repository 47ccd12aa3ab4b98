"""Finds the lines of the user's code: of cells, and of a script that runs."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from IPython.core.compilerop import CachingCompiler

from nbdist.ipc.stacks import cell_of, location_of

__all__ = ["last_line", "line_now", "line_of", "name_by_number", "script"]

_script: str | None = None


def name_by_number(shell: Any) -> None:
    """Have a shell give the code of cells file names that hold the In[] number.

    `nbdist.ipc.stacks.cell_of` reads it from these names. ipykernel's names hold the
    process id, so that equal warnings of the ranks would differ.
    """
    compiler = shell.compile
    compiler.get_code_name = MethodType(CachingCompiler.get_code_name, compiler)


@contextmanager
def script(path: str) -> Iterator[None]:
    """Treat lines of this file as the user's, like a cell's, within this block."""
    global _script
    before, _script = _script, path
    try:
        yield
    finally:
        _script = before


def line_of(filename: str, line: int) -> str:
    """A user's line in words, such as "In[7] line 4" or "train.py line 4".

    Returns "" for a line that is not the user's.
    """
    is_users = cell_of(filename) is not None or filename == _script
    return location_of(filename, line) if is_users else ""


def last_line(error: BaseException) -> str:
    """The innermost user's line of an exception's traceback, as `line_of` gives it."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        location = line_of(frame.f_code.co_filename, line)
        if location:
            return location
    return ""


def line_now() -> str:
    """The innermost user's line that this thread is in, as `line_of` gives it."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        if location := line_of(frame.f_code.co_filename, line):
            return location
    return ""
