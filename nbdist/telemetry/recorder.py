"""Records a rank's scalars without waiting, and publishes them in batches."""

from __future__ import annotations

import logging
import operator
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, SupportsIndex

from nbdist.errors import UsageError
from nbdist.ipc.locks import Condition, Event
from nbdist.telemetry.loops import Loops
from nbdist.telemetry.scalars import Deferred, capture
from nbdist.wire import (
    Batch,
    DeviceSample,
    Mark,
    MarkKind,
    Sample,
    StepProgress,
)

__all__ = ["Recorder"]

logger = logging.getLogger(__name__)


_Values = dict[str, float | Deferred]


class _Draft(NamedTuple):
    """A sample whose values may still be on a device."""

    rank: int
    step: int
    time: float
    scalars: _Values
    is_internal: bool

    def finish(self) -> Sample:
        scalars = {
            name: value if isinstance(value, float) else value.value()
            for name, value in self.scalars.items()
        }
        return Sample(self.rank, self.step, self.time, scalars, self.is_internal)


class Recorder:
    """Collects the records of one rank, and publishes them from its own thread.

    `log` waits neither for the device nor for the notebook. When the buffer is full,
    the oldest records are dropped, and `Batch.dropped` counts them.

    Args:
        rank: This rank's number. Assign to `rank` after a change of membership.
        publish: Sends one batch to the notebook. Only the recorder's thread calls it,
            and it may block. If it raises, the batch is lost, and the notebook notices
            the gap in the numbers.
        capacity: The most records in the buffer.
        interval_s: The least number of seconds between two batches.
    """

    def __init__(
        self,
        rank: int,
        publish: Callable[[Batch], None],
        *,
        capacity: int = 10_000,
        interval_s: float = 0.25,
    ) -> None:
        self.rank = rank
        self._publish = publish
        self._interval_s = interval_s
        self._source = uuid.uuid4().hex
        self._sequence = 0
        self._next_step = self._internal_step = self._shares_step = 0
        self._logged: int | None = None
        """The step of the last `log` in this cell."""
        self._optimizer_steps: Counter[int] = Counter()
        """The steps of each optimizer in this cell."""
        self.loops = Loops()
        """Gives the progress where neither `log` nor `count_batches` does."""
        self._total: int | None = None
        self._progress: StepProgress | None = None
        self._buffer: deque[_Draft | DeviceSample | Mark] = deque(maxlen=capacity)
        self._accepted = self._dropped = self._sent = 0
        self._failing = self._closed = False
        self._lock = threading.Lock()  # protects the fields above
        self._settled = Condition(self._lock)
        self._wake = Event()
        self._hurry = Event()
        self._thread = threading.Thread(
            target=self._run, name="nbdist-recorder", daemon=True
        )
        self._thread.start()

    def log(
        self,
        step: SupportsIndex | None = None,
        *,
        total: SupportsIndex | None = None,
        **scalars: object,
    ) -> None:
        """Record scalars of this rank for the notebook's monitor.

        Any rank may call at any time. No rank waits for another. A CUDA scalar is
        copied on the current stream and read later, without a synchronisation.

        Args:
            step: The training step, from 0 on. Default: the last step plus one.
            total: The number of steps of the training, from which the monitor computes
                the remaining time. It holds until `end_loops`.
            **scalars: Numbers, numpy scalars, or tensors of one element. NaN is
                allowed.

        Raises:
            UsageError: A value is not one real number, the step is not an integer, or
                the total is not an integer of 1 or more.
        """
        if not scalars:
            raise UsageError("log() without a value: pass at least one, log(loss=x)")
        number = self._next_step if step is None else _as_step(step)
        values = _captured(scalars)
        if total is not None:
            self._total = _as_total(total)
        # Before the record, whose batch has the step and the progress.
        if self._total is not None:
            done = number + 1, self._total
            self._progress = StepProgress(time.time(), *done, "steps")
        self._next_step = number + 1
        self._logged = number
        self._draft(number, values)

    def record_internal(self, **scalars: object) -> None:
        """Record nbdist's own scalars. Their steps count the calls of this method.

        The steps of the user's scalars do not change.
        """
        self._draft(self._internal_step, _captured(scalars), is_internal=True)
        self._internal_step += 1

    def record_shares(self, shares: Mapping[str, float]) -> None:
        """Record what the main thread has done lately, at the training's step.

        Before the first step of a cell, and after the cell, it is the step after the
        last one, so that what was recorded before is kept.
        """
        step = self.step
        if step is None:
            step = max(self._shares_step, self._next_step)
        self._shares_step = step + 1
        self._draft(step, _captured(shares), is_internal=True)

    def count_step(self, optimizer: object) -> None:
        """Note that an optimizer has made a step."""
        self._optimizer_steps[id(optimizer)] += 1

    @property
    def step(self) -> int | None:
        """The training step in this cell, from 0 on; None before the first.

        It is the last one that was logged. If nothing is logged, the steps of the
        optimizer are counted; of several ones, that with most.
        """
        if self._logged is not None:
            return self._logged
        counts = list(self._optimizer_steps.values())
        return max(counts) - 1 if counts else None

    def count_batches(self, done: int, total: int) -> None:
        """Set the progress in an epoch. It is ignored if `log` has been given a total.

        The next record publishes it.
        """
        if self._total is None:
            self._progress = StepProgress(time.time(), done, total, "batches")

    def end_loops(self) -> None:
        """Forget the progress, because the cell that had the loop has ended."""
        self._total = self._progress = self._logged = None
        self.loops.clear()
        self._optimizer_steps = Counter()

    def mark(self, kind: MarkKind, text: str, *, of_world: bool = False) -> None:
        """Mark an event in the charts.

        Args:
            kind, text: As for `Mark`.
            of_world: Whether it concerns the world, rather than this rank.
        """
        ranks = () if of_world else (self.rank,)
        self.record(Mark(time.time(), kind, text, ranks))

    def _draft(self, step: int, values: _Values, *, is_internal: bool = False) -> None:
        self.record(_Draft(self.rank, step, time.time(), values, is_internal))

    @property
    def steps(self) -> int:
        """The step of the next `log` without `step`."""
        return self._next_step

    @property
    def position(self) -> tuple[int, int]:
        """The steps of the next `log` without `step`, and of `record_internal`."""
        return self._next_step, self._internal_step

    def continue_from(self, position: tuple[int, int]) -> None:
        """Continue the steps of another rank, whose `position` this was."""
        self._next_step, self._internal_step = position

    def record(self, entry: _Draft | DeviceSample | Mark) -> None:
        """Queue one record for the next batch."""
        with self._lock:
            if not self._buffer:  # first, because an interrupt may come in between
                self._wake.set()
            elif len(self._buffer) == self._buffer.maxlen:
                self._dropped += 1
            self._buffer.append(entry)
            self._accepted += 1

    def flush(self, timeout: float) -> bool:
        """Publish all records now, without waiting for the interval.

        Args:
            timeout: The most seconds to wait.

        Returns:
            Whether all records were passed to `publish` in time.
        """
        with self._settled:
            target = self._accepted
            if self._sent + self._dropped >= target:
                return True
            self._hurry.set()
            return self._settled.wait_for(
                lambda: self._sent + self._dropped >= target, timeout
            )

    def close(self, timeout: float = 1.0) -> bool:
        """Publish the remaining records, and end the thread. Safe to call twice.

        Args:
            timeout: The most seconds to wait for a `publish` that blocks.

        Returns:
            Whether the thread has ended.
        """
        self._closed = True
        self._hurry.set()
        self._wake.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            self._publish_pending()
            self._hurry.wait(self._interval_s)
            self._hurry.clear()
        self._publish_pending()

    def _publish_pending(self) -> None:
        with self._lock:
            drafts = list(self._buffer)
            self._buffer.clear()
            dropped = self._dropped
        if not drafts:
            return
        records = tuple(d.finish() if isinstance(d, _Draft) else d for d in drafts)
        self._send(
            Batch(
                self.rank,
                self._source,
                self._sequence,
                dropped,
                records,
                self._progress or self.loops.progress(),
                self.step,
            )
        )
        self._sequence += 1
        with self._settled:
            self._sent += len(drafts)
            self._settled.notify_all()

    def _send(self, batch: Batch) -> None:
        try:
            self._publish(batch)
            self._failing = False
        except Exception:  # recording continues after any error of the transport
            if not self._failing:
                logger.warning("Metrics do not reach the notebook.", exc_info=True)
            self._failing = True


def _captured(scalars: Mapping[str, object]) -> _Values:
    return {name: capture(name, value) for name, value in scalars.items()}


def _as_total(total: SupportsIndex) -> int:
    try:
        number = operator.index(total)
    except TypeError:
        number = 0
    if number < 1:
        raise UsageError(
            f"log(total={total!r}) takes the number of steps, an integer of 1 or more"
        )
    return number


def _as_step(step: SupportsIndex) -> int:
    try:
        return operator.index(step)
    except TypeError as error:
        what = type(step).__name__
        raise UsageError(
            f"log(step=...) takes an integer, not a {what}: pass int(step)."
        ) from error
