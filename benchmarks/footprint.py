"""What a program and all its descendants take: seconds, CPU time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

__all__ = ["Meter"]


def total(quantity: Callable[[psutil.Process], float]) -> float:
    """The sum of a quantity over this process and all its descendants."""
    this = psutil.Process()
    found = 0.0
    for process in [this, *this.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            found += quantity(process)
    return found


def cpu_seconds() -> float:
    """The CPU time of all these processes, and of their children that have ended."""
    return total(lambda process: sum(process.cpu_times()[:4]))


def pss_bytes() -> float:
    """The memory of all these processes; a shared page counts once (PSS)."""
    return total(lambda process: process.memory_full_info().pss)


class Meter:
    """Measures from its construction on."""

    def __init__(self) -> None:
        self._cpu = cpu_seconds()
        self._begun = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._begun

    def read(self, **more: object) -> dict[str, Any]:
        """Seconds and CPU seconds so far, and the memory now, with further entries."""
        seconds, cpu = self.seconds, cpu_seconds() - self._cpu
        return {"seconds": seconds, "CPU": cpu, "PSS": pss_bytes(), **more}
