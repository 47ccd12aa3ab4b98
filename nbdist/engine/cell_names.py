"""From the file name of compiled code to the notebook cell it came from."""

from __future__ import annotations

import traceback
from types import MethodType
from typing import Any

from IPython.core.compilerop import CachingCompiler

__all__ = ["cell_of", "last_place", "learn_from"]

_shell: Any = None


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


def last_place(error: BaseException) -> str:
    """The last line of a cell that an exception passed: "In[7] line 4", or ""."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        cell = cell_of(frame.f_code.co_filename)
        if cell is not None:
            return f"In[{cell}] line {line}"
    return ""
