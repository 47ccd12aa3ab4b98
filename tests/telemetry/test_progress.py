"""The remaining time is that of the slowest rank, at the rate of the last minute."""

from __future__ import annotations

import pytest

from nbdist.telemetry.progress import ProgressTracker
from nbdist.widgets.source import Eta
from nbdist.wire import StepProgress


def follow(
    tracker: ProgressTracker,
    times: list[float],
    steps: list[int],
    rank: int = 0,
    total: int = 100,
    unit: str = "steps",
) -> None:
    for time, done in zip(times, steps, strict=True):
        tracker.update(rank, StepProgress(time, done, total, unit))


def eta(tracker: ProgressTracker, now: float) -> Eta:
    found = tracker.eta(now)
    assert found is not None
    return found


def test_the_remaining_steps_take_as_long_as_those_of_the_last_minute() -> None:
    tracker = ProgressTracker()
    assert tracker.eta(0.0) is None
    times = [float(second) for second in range(200)]
    steps = [second // 10 if second < 100 else second - 90 for second in range(200)]
    follow(tracker, times, steps, total=209)
    assert eta(tracker, 199.0) == Eta("steps", 109, 209, 1.0, 100.0)


def test_many_steps_a_second_keep_few_points() -> None:
    tracker = ProgressTracker()
    times = [step / 1000 for step in range(1, 9001)]
    follow(tracker, times, list(range(1, 9001)), total=18_000)
    found = eta(tracker, 9.0)
    assert found.rate == pytest.approx(1000)
    assert found.left_s == pytest.approx(9.0)
    assert len(tracker._tracks[0].points) <= 12


def test_steps_of_more_than_a_minute_have_a_rate() -> None:
    tracker = ProgressTracker()
    follow(tracker, [0.0, 90.0, 180.0, 270.0], [1, 2, 3, 4], total=10)
    assert eta(tracker, 300.0).left_s == 6 * 90.0


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_slowest_rank_decides(slow: int) -> None:
    tracker = ProgressTracker()
    for rank in range(3):
        each = 1 if rank == slow else 2
        times = [1000.0 + second for second in range(10)]
        follow(tracker, times, [each * second + 1 for second in range(10)], rank)
    assert eta(tracker, 1009.0) == Eta("steps", 10, 100, 1.0, 90.0)


def test_a_rank_that_makes_no_steps_has_no_end_in_sight() -> None:
    tracker = ProgressTracker()
    times = [float(second) for second in range(20)]
    follow(tracker, times[:10], list(range(10)), rank=1)
    follow(tracker, times, list(range(20)), rank=0)
    assert eta(tracker, 20.0) == Eta("steps", 9, 100, None, None)
    tracker.keep({0})
    assert eta(tracker, 20.0).left_s == 81.0
    tracker.update(0, None)
    assert tracker.eta(20.0) is None


def test_a_return_to_an_earlier_step_begins_the_rate_anew() -> None:
    tracker = ProgressTracker()
    follow(tracker, [0.0, 10.0, 20.0, 21.0], [10, 20, 30, 12])
    assert eta(tracker, 21.0) == Eta("steps", 12, 100, None, None)
    follow(tracker, [23.0], [14])
    assert eta(tracker, 23.0) == Eta("steps", 14, 100, 1.0, 86.0)


def test_steps_that_count_from_1_end_at_the_total() -> None:
    tracker = ProgressTracker()
    follow(tracker, [0.0, 1.0], [100, 101])
    assert eta(tracker, 60.0) == Eta("steps", 100, 100, None, 0.0)


def test_another_loop_begins_anew() -> None:
    tracker = ProgressTracker()
    follow(tracker, [0.0, 1.0], [1, 2], total=10, unit="batches")
    follow(tracker, [2.0], [5], total=100)
    assert eta(tracker, 2.0) == Eta("steps", 5, 100, None, None)
