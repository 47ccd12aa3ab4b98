"""How long to wait for a process of a host whose cores are shared."""

from __future__ import annotations

import os

from nbdist.ipc.resources import cores

__all__ = ["stretched"]

MOST = 10.0
"""The most times that a wait is stretched."""


def stretched(seconds: float) -> float:
    """A time limit for what takes up to `seconds` where each process has a core.

    It grows with the processes per core of the last minute.
    """
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # the system does not count them
        return seconds
    return seconds * min(MOST, max(1.0, load / cores()))
