"""The history of one metric of all ranks, in bounded memory.

A bucket has the mean, minimum and maximum of the values of `width` consecutive steps,
so that no spike is lost. When a rank has more buckets than the capacity, the width
doubles and neighbouring buckets are merged. A history therefore always spans the whole
run evenly. All ranks have the same width and the same boundaries of buckets.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left

__all__ = ["Metric", "Series"]


class Series:
    """One rank's values of one metric.

    If a step is smaller than the last one, the values from that step on are removed.
    This happens after a checkpoint was restored, or when a training cell runs again.
    Values at the same step are averaged.
    """

    __slots__ = (
        "_counts",
        "buckets",
        "epoch",
        "highs",
        "lows",
        "means",
        "step",
        "time",
        "times",
        "total",
        "value",
    )

    def __init__(self) -> None:
        self.buckets = array("q")
        self.times = array("d")
        self.means = array("d")
        self.lows = array("d")
        self.highs = array("d")
        self._counts = array("q")
        self.epoch = 0
        """Counts the changes to buckets other than the last."""
        self.total = 0
        """Values appended so far."""
        self.step = self.time = self.value = math.nan
        """The latest sample, as it was logged."""

    def __len__(self) -> int:
        return len(self.buckets)

    def append(self, step: int, time: float, value: float, width: int) -> None:
        """Add one sample, at `time` seconds since the epoch."""
        if step < self.step:
            self._forget_from(step // width)
        if self.buckets and self.buckets[-1] == step // width:
            self._merge(len(self.buckets) - 1, time, value, value, value, 1)
        else:
            self._push(step // width, time, value, value, value, 1)
        self.step, self.time, self.value = step, time, value
        self.total += 1

    def coarsen(self) -> None:
        """Merge neighbouring buckets, after the width has doubled."""
        rows = list(zip(*self._columns(), strict=True))
        for column in self._columns():
            del column[:]
        for bucket, *rest in rows:
            if self.buckets and self.buckets[-1] == bucket // 2:
                self._merge(len(self.buckets) - 1, *rest)
            else:
                self._push(bucket // 2, *rest)
        self.epoch += 1

    def _columns(self) -> tuple[array[int] | array[float], ...]:
        """The columns, in the order of `_push`'s arguments."""
        return (
            self.buckets, self.times, self.means, self.lows, self.highs, self._counts
        )  # fmt: skip

    def _forget_from(self, bucket: int) -> None:
        keep = bisect_left(self.buckets, bucket)
        for column in self._columns():
            del column[keep:]
        self.epoch += 1

    def _push(
        self, bucket: int, time: float, mean: float, low: float, high: float, n: int
    ) -> None:
        self.buckets.append(bucket)
        self.times.append(time)
        self.means.append(mean)
        self.lows.append(low)
        self.highs.append(high)
        self._counts.append(n)

    def _merge(
        self, i: int, time: float, mean: float, low: float, high: float, n: int
    ) -> None:
        self._counts[i] += n
        self.times[i] = time
        self.means[i] += (mean - self.means[i]) * n / self._counts[i]
        # The second comparison replaces a NaN, which is neither minimum nor maximum.
        if low < self.lows[i] or self.lows[i] != self.lows[i]:
            self.lows[i] = low
        if high > self.highs[i] or self.highs[i] != self.highs[i]:
            self.highs[i] = high


class Metric:
    """One metric's series of each rank, at one common bucket width."""

    __slots__ = ("_capacity", "is_internal", "series", "width")

    def __init__(self, capacity: int, *, is_internal: bool = False) -> None:
        self._capacity = capacity
        self.is_internal = is_internal
        """Whether nbdist has recorded it, rather than the user."""
        self.series: dict[int, Series] = {}
        self.width = 1

    def append(self, rank: int, step: int, time: float, value: float) -> None:
        """Add one sample of one rank."""
        series = self.series.get(rank)
        if series is None:
            series = self.series[rank] = Series()
        series.append(step, time, value, self.width)
        while len(series) > self._capacity:
            self.width *= 2
            for each in self.series.values():
                each.coarsen()
