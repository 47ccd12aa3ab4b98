"""Keeps the ranks' metrics and device samples in the notebook, for any view.

Imports neither numpy nor ipywidgets.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from nbdist.telemetry.progress import ProgressTracker
from nbdist.telemetry.series import Metric, Series
from nbdist.widgets.source import Cursor, Position, SeriesDelta, Snapshot
from nbdist.wire import Batch, DeviceSample, Mark, MarkKind, RankInfo, format_ranks

__all__ = ["Collector"]

logger = logging.getLogger(__name__)

MAX_METRICS = 200
DEVICE_HISTORY = 60
MARKS_OF_A_KIND = 50
"""So many are kept of each kind: many commits do not displace the death of a rank."""
SAME_MARK_S = 1.0
"""The most seconds between marks of several ranks that are one event."""
_DATA = (
    "_collection",
    "_ranks",
    "_metrics",
    "_devices",
    "_streams",
    "_marks",
    "_mark_changes",
    "_progress",
    "_steps",
)
"""The attributes of a `Collector` that are data, in contrast to its listeners."""


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
    """Keeps a bounded history of each metric and rank, a minute of each device, and the
    last marks.

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
        """Set the attributes of `_DATA`, except the ranks."""
        self._collection = uuid.uuid4().hex
        self._metrics: dict[str, Metric] = {}
        self._devices: dict[int, deque[DeviceSample]] = {}
        self._streams: dict[int, _Stream] = {}
        self._marks: dict[MarkKind, deque[Mark]] = {}
        self._mark_changes = 0
        self._progress = ProgressTracker()
        self._steps: dict[int, int] = {}

    def receive(self, batch: Batch) -> None:
        """Add one batch. Takes microseconds. A repeated batch is ignored."""
        with self._lock:
            if not self._is_new(batch):
                return
            self._progress.update(batch.rank, batch.progress)
            if batch.step is not None:
                self._steps[batch.rank] = batch.step
            for record in batch.records:
                if isinstance(record, DeviceSample):
                    self._keep_device(record)
                elif isinstance(record, Mark):
                    self._keep_mark(record)
                else:
                    for name, value in record.scalars.items():
                        metric = self._metric(name, record.is_internal)
                        if metric is not None:
                            metric.append(record.rank, record.step, record.time, value)
            for follow in self._followers:
                follow(batch)
        self._notify()

    def set_ranks(self, ranks: Iterable[RankInfo]) -> None:
        """Set the ranks of the world, at the start and after each change of members.

        The metrics of ranks that have left are kept. Their device samples are removed.
        A change of members is marked.
        """
        with self._lock:
            before = self._ranks
            self._ranks = sorted(ranks, key=lambda info: info.rank)
            if (change := _change_of(before, self._ranks)) is not None:
                self._keep_mark(change)
            present = {info.rank for info in self._ranks}
            for rank in self._devices.keys() - present:
                del self._devices[rank]
            self._steps = {r: step for r, step in self._steps.items() if r in present}
            self._progress.keep(present)
        self._notify()

    def mark(self, kind: MarkKind, text: str, ranks: Iterable[int] = ()) -> None:
        """Mark an event of this moment. The arguments are the fields of `Mark`."""
        with self._lock:
            self._keep_mark(Mark(time.time(), kind, text, tuple(ranks)))
        self._notify()

    def clear(self) -> None:
        """Remove all samples and marks. The ranks stay."""
        with self._lock:
            streams = self._streams  # kept, or the next batches would count as lost
            self._begin()
            self._streams = streams
        self._notify()

    def state(self) -> bytes:
        """All data, for `restore` in another process of this user."""
        with self._lock:
            return pickle.dumps({name: vars(self)[name] for name in _DATA})

    def restore(self, state: bytes) -> None:
        """Replace all data by those of another collector."""
        with self._lock:
            vars(self).update(pickle.loads(state))
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
            is_current = bool(since.collection) and since.marks == self._mark_changes
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
                marks=None if is_current else self.marks,
                steps=dict(self._steps),
                eta=self._progress.eta(time.time()),
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
        """The names of the metrics, in the order of their first values.

        Those that nbdist has recorded are included.
        """
        with self._lock:
            return list(self._metrics)

    @property
    def marks(self) -> list[Mark]:
        """The last marks of each kind, oldest first."""
        with self._lock:
            kept = [mark for each in self._marks.values() for mark in each]
        return sorted(kept, key=lambda mark: mark.time)

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
                old = since.positions.get((name, rank))
                if old != _position_of(series):
                    deltas.append(_delta_of(name, rank, metric, series, old))
        return deltas

    def _cursor(self) -> Cursor:
        positions = {
            (name, rank): _position_of(series)
            for name, metric in self._metrics.items()
            for rank, series in metric.series.items()
        }
        times = {rank: samples[-1].time for rank, samples in self._devices.items()}
        return Cursor(self._collection, positions, times, self._mark_changes)

    def _keep_device(self, sample: DeviceSample) -> None:
        kept = self._devices.setdefault(sample.rank, deque(maxlen=DEVICE_HISTORY))
        kept.append(sample)

    def _keep_mark(self, mark: Mark) -> None:
        """Add a mark. Ranks that report the same event share a mark."""
        kept = self._marks.setdefault(mark.kind, deque(maxlen=MARKS_OF_A_KIND))
        last = kept[-1] if kept else None
        if (
            last is not None
            and last.text == mark.text
            and abs(mark.time - last.time) <= SAME_MARK_S
        ):
            ranks = tuple(sorted({*last.ranks, *mark.ranks}))
            kept[-1] = replace(last, time=min(last.time, mark.time), ranks=ranks)
        else:
            kept.append(mark)
        self._mark_changes += 1

    def _metric(self, name: str, is_internal: bool) -> Metric | None:
        metric = self._metrics.get(name)
        if metric is None and len(self._metrics) < MAX_METRICS:
            metric = Metric(self._capacity, is_internal=is_internal)
            self._metrics[name] = metric
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


def _change_of(before: list[RankInfo], after: list[RankInfo]) -> Mark | None:
    """The mark of a change of the world's members; None if there is none."""
    known = {info.engine_uuid for info in before}
    new = tuple(info.rank for info in after if info.engine_uuid not in known)
    size, now = len(after), time.time()
    if not before or not after or (not new and size == len(before)):
        return None
    if len(new) == size:
        return Mark(now, "restarted", "all ranks were started again")
    if size != len(before):
        ranks = "1 rank" if size == 1 else f"{size} ranks"
        text = f"the world has {ranks} instead of {len(before)}"
        return Mark(now, "resized", text)
    return Mark(now, "replaced", f"rank {format_ranks(new)} was replaced", new)


def _position_of(series: Series) -> Position:
    """The position at the end of a series, for a cursor."""
    return series.epoch, len(series), series.total


def _delta_of(
    name: str, rank: int, metric: Metric, series: Series, since: Position | None
) -> SeriesDelta:
    """The end of a series, from its first bucket that changed since the position."""
    start = _first_changed(series, since)
    return SeriesDelta(
        metric=name,
        rank=rank,
        width=metric.width,
        start=start,
        steps=_bucket_steps(series, metric.width, start),
        times=series.times[start:],
        means=series.means[start:],
        lows=series.lows[start:],
        highs=series.highs[start:],
        latest=(series.step, series.time, series.value),
        is_internal=metric.is_internal,
    )


def _bucket_steps(series: Series, width: int, start: int = 0) -> array[float]:
    """The first step of each bucket from number `start` on."""
    return array("d", [bucket * width for bucket in series.buckets[start:]])


def _first_changed(series: Series, since: Position | None) -> int:
    """The number of the first bucket that may have changed since the position."""
    if since is None or since[0] != series.epoch:
        return 0
    return max(0, since[1] - 1)  # the last bucket may have new values
