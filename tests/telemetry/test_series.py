"""Histories are bounded and aligned, and keep extreme values."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.telemetry.series import Metric


def metric(values: Iterable[float], capacity: int = 8, every: int = 1) -> Metric:
    made = Metric(capacity)
    for step, value in enumerate(values):
        made.append(0, step * every, float(step), value)
    return made


def test_a_short_history_is_exact() -> None:
    series = metric([3.0, 1.0, 2.0]).series[0]
    assert list(series.buckets) == [0, 1, 2]
    assert list(series.means) == [3.0, 1.0, 2.0]
    assert list(series.times) == [0.0, 1.0, 2.0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_a_history_is_bounded_and_keeps_mean_and_extremes(
    values: list[float], every: int
) -> None:
    made = metric(values, every=every)
    series = made.series[0]
    assert 1 <= len(series) <= 8
    assert min(series.lows) == min(values)
    assert max(series.highs) == max(values)
    weighted = sum(m * n for m, n in zip(series.means, series._counts, strict=True))
    assert weighted == pytest.approx(sum(values), rel=1e-9, abs=1e-3)
    assert sum(series._counts) == len(values)
    assert list(series.buckets) == sorted(set(series.buckets))
    assert (series.step, series.value) == ((len(values) - 1) * every, values[-1])


def test_a_rank_that_is_ahead_widens_the_buckets_of_all() -> None:
    made = Metric(8)
    for rank, steps in ((0, 5), (1, 100)):
        for step in range(steps):
            made.append(rank, step, 0.0, step)
    assert made.width == 16
    assert list(made.series[0].buckets) == [0]
    assert list(made.series[1].buckets) == [0, 1, 2, 3, 4, 5, 6]
    assert made.series[0].means[0] == 2.0


def test_a_step_that_goes_back_removes_what_followed() -> None:
    made = metric([5.0, 4.0, 3.0, 2.0])
    made.append(0, 2, 9.0, 3.5)
    series = made.series[0]
    assert list(series.means) == [5.0, 4.0, 3.5]
    assert series.epoch == 1


def test_values_of_one_step_are_averaged() -> None:
    made = Metric(8)
    for value in (1.0, 2.0, 6.0):
        made.append(0, 4, 0.0, value)
    series = made.series[0]
    assert (list(series.means), list(series.lows), list(series.highs)) == (
        [3.0], [1.0], [6.0]
    )  # fmt: skip


def test_a_nan_is_shown_and_does_not_hide_the_extremes() -> None:
    series = metric([math.nan, 1.0, math.nan, 3.0], capacity=1).series[0]
    assert math.isnan(series.means[0])
    assert (series.lows[0], series.highs[0]) == (1.0, 3.0)


def test_negative_steps_are_kept_in_order() -> None:
    made = Metric(2)
    for step in (-3, -2, -1, 0):
        made.append(0, step, 0.0, step)
    assert len(made.series[0]) <= 2
    assert sum(made.series[0]._counts) == 4
