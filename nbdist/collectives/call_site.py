"""The call site of a collective: the cell and line of the user's program."""

from __future__ import annotations

from types import FrameType
from typing import NamedTuple

from nbdist.ipc.stacks import cell_of

__all__ = ["CallSite", "find_call_site", "where"]

_LIBRARIES = ("nbdist", "torch", "threading", "concurrent", "contextlib", "functools")


class CallSite(NamedTuple):
    """A line of the user's program, in a file or a notebook cell."""

    cell: int | None
    line: int | None


def find_call_site(frame: FrameType | None) -> CallSite:
    """The call site of the first frame outside nbdist and torch, from `frame` outwards.

    Cell and line are None if there is no such frame, as in an autograd thread.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not isinstance(module, str) or module.partition(".")[0] not in _LIBRARIES:
            return CallSite(cell_of(frame.f_code.co_filename), frame.f_lineno)
        frame = frame.f_back
    return CallSite(None, None)


def where(operation: str, site: CallSite | None) -> str:
    """An operation and its call site, such as "all_reduce of In[3] line 2"."""
    if site is None or site.line is None:
        return operation
    cell = "" if site.cell is None else f"In[{site.cell}] "
    return f"{operation} of {cell}line {site.line}"
