"""Times variants of some work in turn, and summarises their times."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

__all__ = ["alternate", "printed_by", "seconds_of", "summary"]

Times = dict[str, list[float]]


def alternate(
    variants: Mapping[str, Callable[[], float]], repeats: int, warmups: int = 1
) -> Times:
    """Run each variant once in each round, so that a disturbance affects all of them.

    Args:
        variants: By name, a function that does the work and returns its seconds.
        repeats: Rounds that are counted.
        warmups: Rounds before them that are not counted.
    """
    times: Times = {name: [] for name in variants}
    for turn in range(warmups + repeats):
        for name, variant in variants.items():
            seconds = variant()
            if turn >= warmups:
                times[name].append(seconds)
    return times


def seconds_of(work: Callable[[], object]) -> Callable[[], float]:
    """A variant whose time is that of one call of `work`."""

    def variant() -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    return variant


def printed_by(
    program: str,
    limit_s: float,
    *arguments: str,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
) -> str:
    """The last line that a program prints in a fresh interpreter.

    Args:
        arguments: Those of the program.
        env: Environment variables to add.
    """
    done = subprocess.run(
        [python, "-c", program, *arguments],
        check=True,
        timeout=limit_s,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
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
