"""How `multiprocessing` starts the worker processes of a rank.

A rank forks them, unless the user chooses another method: a forked worker has all that
the cells have defined. From Python 3.14 on, Python's own default is a fork server.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context
from typing import Any

__all__ = ["prefer_fork", "pythons_own"]

_chooser: Any = context._default_context
_PYTHONS = _chooser._default_context


def prefer_fork() -> None:
    """Make "fork" the default. The user can still choose another method, once."""
    if sys.platform == "linux":
        _chooser._default_context = _chooser.get_context("fork")


@contextmanager
def pythons_own() -> Iterator[None]:
    """Within this block, begin with Python's own default and without a choice.

    A process can choose its method once. What was chosen before is restored at the end.
    """
    before = _chooser._default_context, _chooser._actual_context
    _chooser._default_context, _chooser._actual_context = _PYTHONS, None
    try:
        yield
    finally:
        _chooser._default_context, _chooser._actual_context = before
