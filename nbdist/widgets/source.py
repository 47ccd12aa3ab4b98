"""The data source of the monitor's views: the `Source` protocol and its records.

`nbdist.telemetry.collector.Collector` is a source. The records are defined here because
widgets do not import telemetry.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from nbdist.widgets.table import seconds_text
from nbdist.wire import DeviceSample, Mark, RankInfo

__all__ = ["Cursor", "Eta", "Position", "SeriesDelta", "Snapshot", "Source"]

Position = tuple[int, int, int]
"""Epoch, length and total of a series. The series has changed if one differs."""


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
    is_internal: bool = False
    """Whether nbdist has recorded the metric, rather than the user."""


@dataclass(frozen=True)
class Eta:
    """How far the slowest rank is, and how long it still takes."""

    unit: str
    """"steps", or "batches" of an epoch."""
    done: int
    total: int
    rate: float | None
    """Steps per second over the last minute; None if unknown, or if it has stopped."""
    left_s: float | None
    """Seconds until the end; None likewise."""

    def __str__(self) -> str:
        """Such as "120 of 500 steps, 1.8 steps/s, 3 min 31 s left"."""
        text = f"{self.done:,} of {self.total:,} {self.unit}"
        if self.rate is not None:
            text += f", {self.rate:.3g} {self.unit}/s"
        if self.left_s is not None:
            text += f", {seconds_text(self.left_s)} left"
        return text


@dataclass(frozen=True)
class Cursor:
    """The position of a reader in the data."""

    collection: str = ""
    positions: dict[tuple[str, int], Position] = field(default_factory=dict)
    """The position in each series, by metric and rank."""
    devices: dict[int, float] = field(default_factory=dict)
    """The time of each rank's latest device sample."""
    marks: int = 0
    """The number of changes to the marks."""


@dataclass(frozen=True)
class Snapshot:
    """The changes since a cursor; all data if `full` is true."""

    full: bool
    deltas: list[SeriesDelta]
    ranks: list[RankInfo]
    """The current ranks; empty until the source knows them."""
    devices: dict[int, list[DeviceSample]]
    """The last minute's samples, oldest first, of each rank with a new sample."""
    lost: dict[int, int]
    """The number of records dropped and batches lost, for ranks that have any."""
    marks: list[Mark] | None
    """All marks, oldest first; None if they have not changed."""
    steps: dict[int, int]
    """The training step of each rank, as of `Batch`."""
    eta: Eta | None
    """None if the number of steps is unknown."""
    cursor: Cursor


class Source(Protocol):
    """Holds data, and notifies subscribers of changes."""

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` after each change.

        Returns:
            A function that ends the subscription.
        """
        ...

    def snapshot(self, since: Cursor | None = None) -> Snapshot:
        """The changes since an earlier snapshot's cursor; all data without a cursor."""
        ...
