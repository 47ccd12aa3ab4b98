"""Lists of ranks as text, such as "0-2,5"."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.wire import format_ranks, ranks_in


@given(st.sets(st.integers(0, 40), min_size=1))
@settings(max_examples=50)
def test_a_list_is_read_as_it_was_written(ranks: set[int]) -> None:
    text = format_ranks(ranks)
    assert ranks_in(text) == sorted(ranks)
    parts = [part.split("-") for part in text.split(",")]
    assert all(int(part[0]) < int(part[-1]) for part in parts if len(part) == 2)
    for before, after in pairwise(parts):
        assert int(before[-1]) + 1 < int(after[0])


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([3], "3"), ([1, 0], "0-1"), ([0, 2, 3, 4, 7], "0,2-4,7")],
)
def test_the_text_of_a_list(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "1-2-3", "3-2", "0,3-1"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected ranks"):
        ranks_in(text)
