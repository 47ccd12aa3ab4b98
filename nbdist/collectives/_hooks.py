"""What gates and transports ask of the group they work for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from ._wait import Check

__all__ = ["Hooks"]


@dataclass
class Hooks:
    """Functions of a group, and what its running call must agree on."""

    meet: Callable[[], None]
    """Passes the gate with the running call's signature."""
    differ: Callable[[], NoReturn]
    """Raises, when the ranks have arrived with different signatures."""
    check: Check
    """Raises when the running call must end."""
    on_late: Callable[[], None]
    """Called when a wait takes long."""
    fingerprint: int = 0
    """Of the running call; 0 where calls are not compared."""
