"""Keeps the ranks' metrics and device samples in the notebook, for any view.

Imports neither numpy nor ipywidgets.
"""

from __future__ import annotations

import logging
import threading
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nbdist.telemetry.series import Metric, Series
from nbdist.widgets.source import Cursor, Mark, SeriesDelta, Snapshot
from nbdist.wire import Batch, DeviceSample, RankInfo

__all__ = ["Collector"]

logger = logging.getLogger(__name__)

MAX_METRICS = 200
DEVICE_HISTORY = 60


@dataclass
class _Stream:
    """Counts the batches of one recorder."""

    source: str
    expected: int = 0
    """The number of the next batch."""
    lost: int = 0
    """Batches that have not arrived."""
    dropped: int = 0
    """Records that the recorder has dropped."""


class Collector:
    """Keeps a bounded history of each metric and rank, and a minute of each device.

    Every method may be called from any thread.

    Args:
        capacity: The most buckets of a series; see `nbdist.telemetry.series`.
    """

    def __init__(self, capacity: int = 2048) -> None:
        self._capacity = capacity
        self._lock = threading.RLock()
        self._subscribers: list[Callable[[], None]] = []
        self._followers: list[Callable[[Batch], None]] = []
        self._ranks: list[RankInfo] = []
        self._begin()

    def _begin(self) -> None:
        self._collection = uuid.uuid4().hex
        self._metrics: dict[str, Metric] = {}
        self._devices: dict[int, deque[DeviceSample]] = {}
        self._streams: dict[int, _Stream] = {}

    def receive(self, batch: Batch) -> None:
        """Add one batch. Takes microseconds. A repeated batch is ignored."""
        with self._lock:
            if not self._is_new(batch):
                return
            for record in batch.records:
                if isinstance(record, DeviceSample):
                    self._keep_device(record)
                else:
                    for name, value in record.scalars.items():
                        metric = self._metric(name)
                        if metric is not None:
                            metric.append(record.rank, record.step, record.time, value)
            for follow in self._followers:
                follow(batch)
        self._notify()

    def set_ranks(self, ranks: Iterable[RankInfo]) -> None:
        """Set the ranks of the world, at the start and after each change of members.

        The metrics of ranks that have left are kept. Their device samples are removed.
        """
        with self._lock:
            self._ranks = sorted(ranks, key=lambda info: info.rank)
            present = {info.rank for info in self._ranks}
            for rank in self._devices.keys() - present:
                del self._devices[rank]
        self._notify()

    def clear(self) -> None:
        """Remove all samples. The ranks stay."""
        with self._lock:
            streams = self._streams  # kept, or the next batches would count as lost
            self._begin()
            self._streams = streams
        self._notify()

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` after each change, in the thread that made it.

        Args:
            callback: Must return at once and not raise, as `Event.set` does.

        Returns:
            A function that ends the subscription; safe to call twice.
        """
        with self._lock:
            self._subscribers.append(callback)

        def unsubscribe() -> None:
            with self._lock:
                if callback in self._subscribers:
                    self._subscribers.remove(callback)

        return unsubscribe

    def follow(
        self, callback: Callable[[Batch], None]
    ) -> tuple[Snapshot, Callable[[], None]]:
        """Pass each later batch to `callback(batch)`, once and in the order of arrival.

        Args:
            callback: As that of `subscribe`, but it must not call this object.

        Returns:
            The data before these batches; and a function that ends this, safe to call
            twice.
        """
        with self._lock:
            self._followers.append(callback)
            earlier = self.snapshot()

        def end() -> None:
            with self._lock:
                if callback in self._followers:
                    self._followers.remove(callback)

        return earlier, end

    def snapshot(self, since: Cursor | None = None) -> Snapshot:
        """The changes since an earlier snapshot's cursor; all data without a cursor.

        A changed series is included from its first changed bucket on.
        """
        with self._lock:
            if since is None or since.collection != self._collection:
                since = Cursor()
            return Snapshot(
                full=not since.collection,
                deltas=self._deltas(since),
                ranks=list(self._ranks),
                devices={
                    rank: list(samples)
                    for rank, samples in self._devices.items()
                    if since.devices.get(rank) != samples[-1].time
                },
                lost={
                    rank: stream.lost + stream.dropped
                    for rank, stream in self._streams.items()
                    if stream.lost + stream.dropped
                },
                cursor=self._cursor(),
            )

    def history(self, metric: str) -> dict[int, tuple[array[float], array[float]]]:
        """The steps and values of one metric, by rank; `{}` if it was never logged.

        A point of a long history is the average of several steps, and its step is the
        first of them. `numpy.asarray` and matplotlib accept the arrays.
        """
        with self._lock:
            found = self._metrics.get(metric)
            if found is None:
                return {}
            return {
                rank: (_bucket_steps(series, found.width), series.means[:])
                for rank, series in sorted(found.series.items())
            }

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics, in the order of their first values."""
        with self._lock:
            return list(self._metrics)

    def _is_new(self, batch: Batch) -> bool:
        stream = self._streams.get(batch.rank)
        if stream is None or stream.source != batch.source:
            stream = self._streams[batch.rank] = _Stream(batch.source)
        if batch.sequence < stream.expected:
            return False
        stream.lost += batch.sequence - stream.expected
        stream.expected = batch.sequence + 1
        stream.dropped = batch.dropped
        return True

    def _deltas(self, since: Cursor) -> list[SeriesDelta]:
        deltas = []
        for name, metric in self._metrics.items():
            for rank, series in metric.series.items():
                old = since.marks.get((name, rank))
                if old != _mark_of(series):
                    deltas.append(_delta_of(name, rank, metric.width, series, old))
        return deltas

    def _cursor(self) -> Cursor:
        marks = {
            (name, rank): _mark_of(series)
            for name, metric in self._metrics.items()
            for rank, series in metric.series.items()
        }
        times = {rank: samples[-1].time for rank, samples in self._devices.items()}
        return Cursor(self._collection, marks, times)

    def _keep_device(self, sample: DeviceSample) -> None:
        kept = self._devices.setdefault(sample.rank, deque(maxlen=DEVICE_HISTORY))
        kept.append(sample)

    def _metric(self, name: str) -> Metric | None:
        metric = self._metrics.get(name)
        if metric is None and len(self._metrics) < MAX_METRICS:
            metric = self._metrics[name] = Metric(self._capacity)
            if len(self._metrics) == MAX_METRICS:
                logger.warning(
                    "nbdist.log: more than %d metrics; further ones are not kept.",
                    MAX_METRICS,
                )
        return metric

    def _notify(self) -> None:
        with self._lock:
            subscribers = list(self._subscribers)
        for callback in subscribers:
            callback()


def _mark_of(series: Series) -> Mark:
    """The mark of a series for a cursor."""
    return series.epoch, len(series), series.total


def _delta_of(
    name: str, rank: int, width: int, series: Series, since: Mark | None
) -> SeriesDelta:
    """The end of a series, from its first bucket that changed since the mark."""
    start = _first_changed(series, since)
    return SeriesDelta(
        metric=name,
        rank=rank,
        width=width,
        start=start,
        steps=_bucket_steps(series, width, start),
        times=series.times[start:],
        means=series.means[start:],
        lows=series.lows[start:],
        highs=series.highs[start:],
        latest=(series.step, series.time, series.value),
    )


def _bucket_steps(series: Series, width: int, start: int = 0) -> array[float]:
    """The first step of each bucket from number `start` on."""
    return array("d", [bucket * width for bucket in series.buckets[start:]])


def _first_changed(series: Series, since: Mark | None) -> int:
    """The number of the first bucket that may have changed since the mark."""
    if since is None or since[0] != series.epoch:
        return 0
    return max(0, since[1] - 1)  # the last bucket may have new values
