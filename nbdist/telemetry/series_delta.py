"""Cut from a series what a view has not read yet."""

from __future__ import annotations

from array import array

from nbdist.telemetry.series import Series
from nbdist.widgets.source import Mark, Piece

__all__ = ["bucket_steps", "mark_of", "piece_of"]


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
