"""The options of the magics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.errors import UsageError
from nbdist.magics import parse_ranks
from nbdist.wire import format_ranks


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        (None, None), ("0", [0]), ("0,2-3", [0, 2, 3]), ("3,1", [1, 3]),
        (" 1 , 2 ", [1, 2]), ("1,1-2", [1, 2]),
    ],
)  # fmt: skip
def test_ranks_are_parsed(text: str | None, ranks: list[int] | None):
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", ",", "a", "1-", "-1", "1-2-3", "2-1", "1;2", "²"])
def test_invalid_ranks_are_refused_with_their_text(text: str):
    with pytest.raises(UsageError, match="expected ranks such as") as refused:
        parse_ranks(text)
    assert repr(text) in str(refused.value)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_in_messages_can_be_typed(ranks: set[int]):
    assert parse_ranks(format_ranks(ranks)) == sorted(ranks)
