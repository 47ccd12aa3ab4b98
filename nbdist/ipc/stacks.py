"""A rank's lines in words, and the part of its stack that begins with user code."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = [
    "Frame",
    "cell_name",
    "cell_of",
    "from_user_code",
    "is_own_file",
    "location_of",
]

CELL = re.compile(r"<ipython-input-(\d+)-")
"""The name that IPython gives a cell's code."""
ENTRIES = ("/nbdist/engine/run_script.py", "/nbdist/engine/calls.py")
"""The files of the functions that call the user's scripts and functions."""
PACKAGE = str(Path(__file__).parents[1]) + os.sep


@lru_cache
def cell_of(filename: str) -> int | None:
    """The In[] number of the cell whose code has this file name; None for a file."""
    match = CELL.match(filename)
    return int(match[1]) if match else None


def cell_name(number: int, name: str) -> str:
    """A file name for the code of a cell, as IPython gives it.

    Args:
        number: The In[] number.
        name: Differs between cells with different text.
    """
    return f"<ipython-input-{number}-{name}>"


def is_own_file(filename: str) -> bool:
    """Whether code with this file name is nbdist's."""
    return filename.startswith(PACKAGE)


def location_of(filename: str, line: int) -> str:
    """A line in words: "In[7] line 4", or "train.py line 4"."""
    cell = cell_of(filename)
    name = Path(filename).name if cell is None else f"In[{cell}]"
    return f"{name} line {line}"


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str
    source: str = ""
    """The text of the line; "" if it is not known."""

    @property
    def cell(self) -> int | None:
        """The In[] number of the code's cell; None if the code is not in a cell."""
        return cell_of(self.file)

    @property
    def location(self) -> str:
        """The line in words, as of `location_of`."""
        return location_of(self.file, self.line)

    def __str__(self) -> str:
        source = f"\n    {self.source}" if self.source else ""
        name = self.file if self.cell is None else f"In[{self.cell}]"
        return f"  {name} line {self.line}, in {self.function}{source}"


def from_user_code(frames: Sequence[Frame]) -> list[Frame]:
    """The frames from the first frame of the user's cell, script or function on.

    Args:
        frames: The stack of a rank's thread, outermost call first.

    Returns:
        These frames; an empty list if the thread runs no user code.
    """
    for index, frame in enumerate(frames):
        if frame.cell is not None:
            return list(frames[index:])
    entries = [i for i, frame in enumerate(frames) if frame.file.endswith(ENTRIES)]
    return list(frames[entries[-1] + 1 :]) if entries else []
