"""From the file name of compiled code to the notebook cell it came from."""

from __future__ import annotations

from typing import Any

__all__ = ["cell_of", "learn_from"]

_shell: Any = None


def learn_from(shell: Any) -> None:
    """Use the cells that this IPython shell has compiled."""
    global _shell
    _shell = shell


def cell_of(filename: str) -> int | None:
    """The In[] number of the cell that was compiled under this name, if one was."""
    if _shell is None:
        return None
    number = _shell.compile._filename_map.get(filename)
    return int(number) if number is not None else None
