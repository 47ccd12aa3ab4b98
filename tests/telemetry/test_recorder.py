"""The recorder is bounded, numbers its batches, and never blocks."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import pytest
import torch

from nbdist.errors import UsageError
from nbdist.telemetry.recorder import Recorder
from nbdist.wire import Batch, DeviceSample, Mark, Sample
from tests.processes import HANG_S

DEVICE = DeviceSample(0, 0.0, "cpu", 1.0, 2, 3, 1.0, 2)


@contextmanager
def recorder(publish: Callable[[Batch], None], **options: float) -> Iterator[Recorder]:
    made = Recorder(3, publish, **options)
    try:
        yield made
    finally:
        assert made.close(HANG_S)


def logged(**scalars: object) -> dict[str, float]:
    """Log once; return the record that is published."""
    batches: list[Batch] = []
    with recorder(batches.append) as made:
        made.log(**scalars)
        assert made.flush(HANG_S)
    (sample,) = batches[0].records
    assert isinstance(sample, Sample)
    return sample.scalars


def test_a_record_has_rank_step_time_and_scalars() -> None:
    batches: list[Batch] = []
    before = time.time()
    with recorder(batches.append) as made:
        made.log(7, loss=0.5, lr=1)
        assert made.flush(HANG_S)
    (sample,) = batches[0].records
    assert isinstance(sample, Sample)
    assert (sample.rank, sample.step) == (3, 7)
    assert sample.scalars == {"loss": 0.5, "lr": 1.0}
    assert before <= sample.time <= time.time()


def test_a_mark_is_published_with_the_records() -> None:
    batches: list[Batch] = []
    with recorder(batches.append) as made:
        made.mark("nan", "step 2: x has NaNs")
        made.mark("commit", "commit 7", of_world=True)
        assert made.flush(HANG_S)
    marks = [record for batch in batches for record in batch.records]
    assert all(isinstance(mark, Mark) for mark in marks)
    assert list(map(str, marks)) == ["rank 3: step 2: x has NaNs", "commit 7"]


def progress(batches: list[Batch]) -> tuple[int, int, str] | None:
    """Steps done, total and unit of the last batch."""
    last = batches[-1].progress
    return None if last is None else (last.done, last.total, last.unit)


def test_a_total_holds_until_the_loops_end() -> None:
    batches: list[Batch] = []
    with recorder(batches.append) as made:
        made.log(loss=1)
        assert made.flush(HANG_S)
        assert progress(batches) is None
        made.log(10, total=np.int64(50), loss=1)
        made.log(loss=1)
        made.count_batches(3, 4)
        assert made.flush(HANG_S)
        assert progress(batches) == (12, 50, "steps")
        made.log(loss=1)
        made.end_loops()
        assert made.flush(HANG_S)
        assert progress(batches) is None
        made.count_batches(3, 4)
        made.record_internal(step_s=1.0)
        assert made.flush(HANG_S)
        assert progress(batches) == (3, 4, "batches")
    scalars = [r.scalars for b in batches for r in b.records if isinstance(r, Sample)]
    assert all("total" not in each for each in scalars)


@pytest.mark.parametrize("total", [0, -1, 2.5, "10"])
def test_a_total_that_is_no_number_of_steps_is_refused(total: object) -> None:
    why = rf"total={total!r}.* 1 or more"
    with recorder(lambda _: None) as made, pytest.raises(UsageError, match=why):
        made.log(total=total, loss=1)  # type: ignore[arg-type]


def test_a_record_is_queued_after_its_step_and_progress_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch that has the record, which may be the last one, has them, too."""
    with recorder(lambda _: None) as made:
        seen = []
        monkeypatch.setattr(made, "record", lambda _: seen.append(made.step))
        made.log(loss=1.0)
        made.log(7, total=10, loss=1.0)
    assert seen == [0, 7]


def test_a_value_that_is_refused_makes_no_step() -> None:
    with recorder(lambda _: None) as made:
        with pytest.raises(UsageError):
            made.log(5, loss="much")
        assert (made.step, made.steps) == (None, 0)


def test_a_step_follows_the_previous_one() -> None:
    batches: list[Batch] = []
    with recorder(batches.append) as made:
        made.log(loss=1)
        made.log(loss=1)
        made.log(step=np.int64(40), loss=1)
        made.log(loss=1)
    records = [record for batch in batches for record in batch.records]
    assert [r.step for r in records if isinstance(r, Sample)] == [0, 1, 40, 41]


@pytest.mark.parametrize(
    "value",
    [2, 2.0, Fraction(2), np.float32(2), np.int8(2), np.array(2.0),
     np.array([2]), torch.tensor(2.0), torch.tensor([2]),
     torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(2.0, requires_grad=True)],
    ids=repr,
)  # fmt: skip
def test_every_kind_of_number_is_recorded(value: object) -> None:
    assert logged(x=value) == {"x": 2.0}


def test_nan_and_infinity_are_recorded() -> None:
    scalars = logged(a=math.nan, b=-math.inf, c=torch.tensor(math.nan))
    assert math.isnan(scalars["a"])
    assert scalars["b"] == -math.inf
    assert math.isnan(scalars["c"])


@pytest.mark.parametrize(
    ("value", "said"),
    [("0.5", "not a str"), (b"1", "not a bytes"), (None, "not a NoneType"),
     (1j, "not a complex"), ([1.0], "not a list"), (10**400, "not a int"),
     (np.complex64(1), "not a complex"), (np.zeros(2), r"of shape \(2,\)"),
     (torch.zeros(2, 1), r"of shape \(2, 1\)"), (torch.zeros(0), r"of shape \(0,\)"),
     (torch.tensor(1j), "log a real number"),
     (torch.zeros((), device="meta"), "log a real number")],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_values_that_are_not_numbers_are_refused(value: object, said: str) -> None:
    batches: list[Batch] = []
    with recorder(batches.append) as made:
        with pytest.raises(UsageError, match=r"log\(loss=...\)") as caught:
            made.log(loss=value)
        assert caught.match(said)
        assert made.flush(HANG_S)
    assert batches == []


def test_a_call_without_a_value_or_with_an_invalid_step_is_refused() -> None:
    with recorder(lambda _: None) as made:
        with pytest.raises(UsageError, match="log\\(loss=x\\)"):
            made.log()
        with pytest.raises(UsageError, match="int\\(step\\)"):
            made.log(step=0.5, loss=1.0)  # type: ignore[arg-type]


def test_batches_have_a_number_and_the_name_of_their_recorder() -> None:
    batches: list[Batch] = []
    with recorder(batches.append) as first, recorder(batches.append) as second:
        for made in (first, first, second):
            made.log(loss=1)
            assert made.flush(HANG_S)
    assert [batch.sequence for batch in batches] == [0, 1, 0]
    assert batches[0].source == batches[1].source != batches[2].source


def test_there_is_at_most_one_batch_in_an_interval() -> None:
    times: list[float] = []
    second = threading.Event()

    def publish(_: Batch) -> None:
        times.append(time.monotonic())
        if len(times) == 2:
            second.set()

    with recorder(publish, interval_s=0.2) as made:
        while not second.wait(0.001):
            made.log(loss=1)
    assert times[1] - times[0] >= 0.19


def test_logging_does_not_wait_and_drops_the_oldest_records() -> None:
    arrived, go, batches = threading.Event(), threading.Event(), queue.SimpleQueue()

    def publish(batch: Batch) -> None:
        arrived.set()
        assert go.wait(HANG_S)
        batches.put(batch)

    with recorder(publish, capacity=10) as made:
        made.log(loss=0)
        assert arrived.wait(HANG_S)
        for step in range(1, 26):
            made.log(loss=step)
        assert not made.flush(0.05)
        go.set()
        assert made.flush(HANG_S)
    first, second = batches.get(timeout=HANG_S), batches.get(timeout=HANG_S)
    assert first.dropped == 0
    assert second.dropped == 15
    assert [record.step for record in second.records] == list(range(16, 26))


def test_a_failing_transport_is_reported_once_and_recording_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batches: list[Batch] = []

    def publish(batch: Batch) -> None:
        if batch.sequence < 2:
            raise OSError("the socket is closed")
        batches.append(batch)

    with caplog.at_level(logging.WARNING), recorder(publish) as made:
        for _ in range(3):
            made.log(loss=1)
            assert made.flush(HANG_S)
    assert [batch.sequence for batch in batches] == [2]
    assert caplog.text.count("do not reach the notebook") == 1


def test_device_samples_are_in_the_same_batches() -> None:
    batches: list[Batch] = []
    with recorder(batches.append) as made:
        made.record(DEVICE)
        assert made.flush(HANG_S)
    assert batches[0].records == (DEVICE,)


def test_close_publishes_the_rest_and_may_be_called_twice() -> None:
    batches: list[Batch] = []
    made = Recorder(0, batches.append, interval_s=60)
    for _ in range(3):
        made.log(loss=1)
    assert made.close(HANG_S)
    assert made.close(HANG_S)
    assert sum(len(batch.records) for batch in batches) == 3
    assert not [t for t in threading.enumerate() if t.name == "nbdist-recorder"]


def test_flush_with_nothing_to_do_returns_at_once() -> None:
    with recorder(lambda _: None) as made:
        assert made.flush(0)


@pytest.mark.streams
@pytest.mark.gpu
def test_a_cuda_scalar_is_copied_without_synchronising() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    batches: list[Batch] = []
    value = torch.ones((), device="cuda")
    with recorder(batches.append) as made:
        made.log(loss=value)  # pays for what is set up once
        value += 0  # loads its kernel, which can wait for the GPU
        torch.cuda._sleep(2_000_000_000)
        made.log(loss=value)
        value += 1  # in place, and after the log
        assert not torch.cuda.current_stream().query(), "the GPU must still be busy"
        assert made.flush(HANG_S)
    records = [record for batch in batches for record in batch.records]
    assert [r.scalars["loss"] for r in records if isinstance(r, Sample)] == [1.0, 1.0]


def test_a_flush_is_told_of_the_records_that_were_sent() -> None:
    class Told(threading.Condition):
        count = 0

        def notify_all(self) -> None:
            self.count += 1
            super().notify_all()

    batches: list[Batch] = []
    with recorder(batches.append) as made:
        told = made._settled = Told(made._lock)
        made.log(loss=1.0)
        assert made.flush(5)
    assert told.count == len(batches) == 1
