"""The part of a rank's Python stack that begins with the user's code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Frame", "from_user_code"]

CELL = re.compile(r"<ipython-input-(\d+)-")
"""The name that IPython gives a cell's code."""
ENTRIES = ("/nbdist/engine/run_script.py", "/nbdist/engine/calls.py")
"""The files of the functions that call the user's scripts and functions."""


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
        match = CELL.match(self.file)
        return int(match[1]) if match else None

    @property
    def location(self) -> str:
        """The line in words: "In[7] line 4", or "train.py line 4"."""
        name = Path(self.file).name if self.cell is None else f"In[{self.cell}]"
        return f"{name} line {self.line}"

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
