"""The sentence on the rank for which the others wait."""

from __future__ import annotations

import pytest

from nbdist.widgets.slow_rank import slow_rank
from nbdist.wire import TimeSplit


def split(
    compute: float, communication: float, data: float, place: str = ""
) -> TimeSplit:
    return TimeSplit(compute, communication, data, place, compute)


def test_the_rank_that_waits_for_data_is_named() -> None:
    fast, slow = split(0.3, 0.5, 0.2), split(0.2, 0.1, 0.7, "In[1] line 3")
    assert slow_rank({0: fast, 1: fast, 2: slow, 3: fast}) == (
        "rank 2 takes 1.8 times as long as the others: it waits for data 70% of the "
        "time, at In[1] line 3"
    )


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("In[1] line 3", "it is at In[1] line 3 for 80% of the time"),
        ("", "it computes 80% of the time"),
    ],
)
def test_the_rank_that_computes_is_named_with_its_line(place: str, why: str) -> None:
    fast, slow = split(0.1, 0.85, 0.05), split(0.8, 0.15, 0.05, place)
    named = f"rank 0 takes 5.7 times as long as the others: {why}"
    assert slow_rank({0: slow, 1: fast}) == named


def test_ranks_that_only_wait_make_no_endless_factor() -> None:
    assert "over 10 times" in slow_rank({0: split(0, 1, 0), 1: split(1, 0, 0)})


@pytest.mark.parametrize(
    "splits",
    [{}, {0: split(1, 0, 0)}, {0: split(0.5, 0.3, 0.2), 1: split(0.6, 0.2, 0.2)}],
)
def test_no_rank_is_named_without_a_clear_difference(
    splits: dict[int, TimeSplit],
) -> None:
    assert slow_rank(splits) == ""
