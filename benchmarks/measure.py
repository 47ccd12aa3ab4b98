"""Contestants that take turns, and what their times say."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

__all__ = ["alternate", "printed_by", "seconds_of", "summary"]

Times = dict[str, list[float]]


def alternate(
    contestants: Mapping[str, Callable[[], float]], repeats: int, warmups: int = 1
) -> Times:
    """Let each contestant run once, then each again: what disturbs, disturbs all.

    Args:
        contestants: By name, a function that does the work and returns its seconds.
        warmups: Rounds that are not counted.
    """
    times: Times = {name: [] for name in contestants}
    for turn in range(warmups + repeats):
        for name, contestant in contestants.items():
            seconds = contestant()
            if turn >= warmups:
                times[name].append(seconds)
    return times


def seconds_of(work: Callable[[], object]) -> Callable[[], float]:
    """A contestant that times the whole of `work`."""

    def contestant() -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    return contestant


def printed_by(program: str, limit_s: float) -> str:
    """The last line that a program prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=limit_s,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout.splitlines()[-1]


def summary(times: list[float], unit: str = "ms") -> str:
    """The median, and the middle half of the runs: "3.1 ms (3.0 to 3.4)"."""
    scale = {"ms": 1e3, "s": 1.0}[unit]
    if len(times) == 1:
        return f"{_short(times[0] * scale)} {unit}"
    low, middle, high = statistics.quantiles(
        [t * scale for t in times], n=4, method="inclusive"
    )
    return f"{_short(middle)} {unit} ({_short(low)} to {_short(high)})"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
