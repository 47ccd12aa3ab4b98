"""Leaves ipykernel's debugger out of a rank, where no front end can reach it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

__all__ = ["leave_out", "unused"]


def leave_out() -> None:
    """Import ipykernel's debugger as where debugpy is not installed.

    debugpy takes 8 MB and 0.2 s. The user's code can still import it.
    """
    is_first = sys.modules.setdefault("debugpy", None) is None  # type: ignore[arg-type]
    import ipykernel.debugger  # noqa: F401

    if is_first:
        del sys.modules["debugpy"]


@contextlib.contextmanager
def unused() -> Iterator[None]:
    """Make ipykernel's kernel in this block, without what it prepares for a debugger.

    It would read a name of each imported module, and so write to 10 MB of memory that
    forked ranks share.
    """
    ipkernel: Any = importlib.import_module("ipykernel.ipkernel")
    ipkernel.sys = SimpleNamespace(**{**vars(sys), "modules": {}})
    try:
        yield
    finally:
        ipkernel.sys = sys
