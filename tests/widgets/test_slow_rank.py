"""The sentence on the rank for which the others wait."""

from __future__ import annotations

import pytest

from nbdist.widgets.slow_rank import slow_rank
from nbdist.wire import TimeSplit


def split(
    compute: float,
    communication: float,
    data: float,
    other: float = 0.0,
    place: str = "",
    reason: str = "",
) -> TimeSplit:
    shares = compute, communication, data, other
    return TimeSplit(*shares, reason, place, 0.9, "In[1] line 9")


@pytest.mark.parametrize(
    ("slow", "sentence"),
    [
        (
            split(0.2, 0.1, 0.7, place="In[1] line 3"),
            "rank 2 takes 1.8 times as long as the others: it waits for data 70% of "
            "the time, at In[1] line 3",
        ),
        (
            split(0.8, 0.1, 0.1, place="In[1] line 3"),
            "rank 2 takes 1.8 times as long as the others: it computes 80% of the "
            "time, at In[1] line 3",
        ),
        (
            split(0.2, 0.1, 0.1, 0.6, "In[1] line 3", "it reads or writes files"),
            "rank 2 takes 1.8 times as long as the others: it reads or writes files "
            "60% of the time, at In[1] line 3",
        ),
        (
            split(0.8, 0.1, 0.1),
            "rank 2 takes 1.8 times as long as the others: it computes 80% of the time",
        ),
    ],
)
def test_the_slow_rank_is_named_with_what_it_does_more_than_the_others(
    slow: TimeSplit, sentence: str
) -> None:
    fast = split(0.3, 0.5, 0.2)
    assert slow_rank({0: fast, 1: fast, 2: slow, 3: fast}) == sentence


def test_ranks_that_only_wait_make_no_endless_factor() -> None:
    stopped = split(0, 0, 0, 1, "In[1] line 4", "it is in the debugger")
    assert slow_rank({0: split(0, 1, 0), 1: stopped}) == (
        "the others wait for rank 1: it is in the debugger 100% of the time, at "
        "In[1] line 4"
    )


def test_ranks_that_communicate_most_of_the_time_are_told_where() -> None:
    splits = {rank: split(0.15, 0.85, 0) for rank in range(4)}
    found = "the ranks communicate 85% of the time, at In[1] line 9"
    assert slow_rank(splits) == found


@pytest.mark.parametrize(
    "splits",
    [{}, {0: split(1, 0, 0)}, {0: split(0.5, 0.3, 0.2), 1: split(0.6, 0.2, 0.2)}],
)
def test_no_rank_is_named_without_a_clear_difference(
    splits: dict[int, TimeSplit],
) -> None:
    assert slow_rank(splits) == ""
