"""Maps file names of compiled code to the notebook's cells and to scripts."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

from IPython.core.compilerop import CachingCompiler

__all__ = ["cell_of", "last_line", "learn_from", "line_of", "script"]

_shell: Any = None
_script: str | None = None


def learn_from(shell: Any) -> None:
    """Set the IPython shell that compiles the cells."""
    global _shell
    _shell = shell
    # ipykernel's names hold the process id, so that equal warnings of the ranks would
    # differ. IPython's own names hold the cell's number.
    compiler = shell.compile
    compiler.get_code_name = MethodType(CachingCompiler.get_code_name, compiler)


def cell_of(filename: str) -> int | None:
    """The In[] number of the cell that was compiled under this name, or None."""
    if _shell is None:
        return None
    number = _shell.compile._filename_map.get(filename)
    return int(number) if number is not None else None


@contextmanager
def script(path: str) -> Iterator[None]:
    """Treat lines of this file as the user's, like a cell's, within this block."""
    global _script
    _script = path
    try:
        yield
    finally:
        _script = None


def line_of(filename: str, line: int) -> str:
    """A user's line in words, such as "In[7] line 4" or "train.py line 4".

    Returns "" for a line that is not the user's.
    """
    cell = cell_of(filename)
    if cell is not None:
        return f"In[{cell}] line {line}"
    if filename == _script:
        return f"{Path(filename).name} line {line}"
    return ""


def last_line(error: BaseException) -> str:
    """The innermost user's line of an exception's traceback, as `line_of` gives it."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        location = line_of(frame.f_code.co_filename, line)
        if location:
            return location
    return ""
