"""From the file name of compiled code to the notebook cell, or script, it came from."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

from IPython.core.compilerop import CachingCompiler

__all__ = ["cell_of", "last_place", "learn_from", "place_of", "script"]

_shell: Any = None
_script: str | None = None


def learn_from(shell: Any) -> None:
    """Use the cells that this IPython shell compiles."""
    global _shell
    _shell = shell
    # ipykernel's names hold the process id, and what the ranks warn of alike would not
    # read alike; IPython's own hold the cell's number.
    compiler = shell.compile
    compiler.get_code_name = MethodType(CachingCompiler.get_code_name, compiler)


def cell_of(filename: str) -> int | None:
    """The In[] number of the cell that was compiled under this name, if one was."""
    if _shell is None:
        return None
    number = _shell.compile._filename_map.get(filename)
    return int(number) if number is not None else None


@contextmanager
def script(path: str) -> Iterator[None]:
    """Within, lines of this file count as the user's own, like those of a cell."""
    global _script
    _script = path
    try:
        yield
    finally:
        _script = None


def place_of(filename: str, line: int) -> str:
    """A line of the user's: "In[7] line 4", or "train.py line 4"; else ""."""
    cell = cell_of(filename)
    if cell is not None:
        return f"In[{cell}] line {line}"
    if filename == _script:
        return f"{Path(filename).name} line {line}"
    return ""


def last_place(error: BaseException) -> str:
    """The last line of the user's that an exception passed, as `place_of` says it."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        place = place_of(frame.f_code.co_filename, line)
        if place:
            return place
    return ""
