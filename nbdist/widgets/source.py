"""What a view reads, and what it asks of whoever has the data.

The records are those of `nbdist.telemetry.collector.Collector`; they stand here because
a view knows nothing of telemetry.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from nbdist.wire import DeviceSample, RankInfo

__all__ = ["Cursor", "Mark", "Piece", "Snapshot", "Source"]

Mark = tuple[int, int, int]
"""Epoch, length and total of a series: when any differs, it has changed."""


@dataclass(frozen=True)
class Piece:
    """The end of one rank's series: from bucket number `start` to its last.

    The columns are parallel. `steps` are the buckets' first steps, `times` their last
    samples' seconds since the epoch.
    """

    metric: str
    rank: int
    width: int
    start: int
    steps: array[float]
    times: array[float]
    means: array[float]
    lows: array[float]
    highs: array[float]
    latest: tuple[float, float, float]
    """Step, time and value of the latest sample, as logged."""


@dataclass(frozen=True)
class Cursor:
    """How far a reader has read."""

    collection: str = ""
    marks: dict[tuple[str, int], Mark] = field(default_factory=dict)
    """Of each metric's and rank's series."""
    devices: dict[int, float] = field(default_factory=dict)
    """Time of each rank's latest device sample."""


@dataclass(frozen=True)
class Snapshot:
    """What changed since a cursor; everything, when `full`."""

    full: bool
    pieces: list[Piece]
    ranks: list[RankInfo]
    """The world as it is now; empty when it was never told."""
    devices: dict[int, list[DeviceSample]]
    """The last minute of each rank that has a new sample, oldest first."""
    lost: dict[int, int]
    """Records dropped and batches lost, of each rank that has any."""
    cursor: Cursor


class Source(Protocol):
    """Has the data, and says when they change."""

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback()` called after each change; returns what ends that."""
        ...

    def snapshot(self, since: Cursor | None = None) -> Snapshot:
        """What changed since the cursor of an earlier snapshot; all without one."""
        ...
