"""What a view reads from the collector: everything, or what changed since a cursor."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from nbdist.telemetry.series import Series
from nbdist.wire import DeviceSample, RankInfo

__all__ = ["Cursor", "Mark", "Piece", "Snapshot", "bucket_steps", "mark_of", "piece_of"]

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


def mark_of(series: Series) -> Mark:
    """Where a series stands now."""
    return series.epoch, len(series), series.total


def piece_of(
    name: str, rank: int, width: int, series: Series, since: Mark | None
) -> Piece:
    """The end of a series, from its first bucket that changed since the mark."""
    start = _first_changed(series, since)
    return Piece(
        metric=name,
        rank=rank,
        width=width,
        start=start,
        steps=bucket_steps(series, width, start),
        times=series.times[start:],
        means=series.means[start:],
        lows=series.lows[start:],
        highs=series.highs[start:],
        latest=(series.step, series.time, series.value),
    )


def bucket_steps(series: Series, width: int, start: int = 0) -> array[float]:
    """The first step of each bucket from number `start` on."""
    return array("d", [bucket * width for bucket in series.buckets[start:]])


def _first_changed(series: Series, since: Mark | None) -> int:
    if since is None or since[0] != series.epoch:
        return 0
    return max(0, since[1] - 1)  # the last bucket may have taken more values since
