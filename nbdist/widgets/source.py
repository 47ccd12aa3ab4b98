"""What a view reads: the `Source` protocol, and the records that a source gives.

`nbdist.telemetry.collector.Collector` is such a source. The records are defined here
because the widgets import nothing of telemetry.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from nbdist.wire import DeviceSample, RankInfo

__all__ = ["Cursor", "Mark", "SeriesDelta", "Snapshot", "Source"]

Mark = tuple[int, int, int]
"""Epoch, length and total of a series: when any differs, it has changed."""


@dataclass(frozen=True)
class SeriesDelta:
    """The end of one rank's series, from bucket number `start` to the last bucket.

    The arrays have one entry for each bucket. `steps` holds the bucket's first step,
    and `times` the time of its last sample, in seconds since the epoch.
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
    """The mark of each series, by metric and rank."""
    devices: dict[int, float] = field(default_factory=dict)
    """The time of each rank's latest device sample."""


@dataclass(frozen=True)
class Snapshot:
    """What changed since a cursor, or everything where `full` is true."""

    full: bool
    deltas: list[SeriesDelta]
    ranks: list[RankInfo]
    """The world as it is now; empty until the source knows of it."""
    devices: dict[int, list[DeviceSample]]
    """The samples of the last minute, oldest first, of each rank with a new one."""
    lost: dict[int, int]
    """The number of records dropped and batches lost, for ranks that have any."""
    cursor: Cursor


class Source(Protocol):
    """Holds the data, and tells subscribers when they change."""

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` after each change; return a function that ends this."""
        ...

    def snapshot(self, since: Cursor | None = None) -> Snapshot:
        """What changed since the cursor of an earlier snapshot; or everything."""
        ...
