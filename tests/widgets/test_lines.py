"""Lines of several ranks are merged: none is lost, and each rank's order is kept."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.widgets.lines import Item, LineSplitter, merge


def merged(*texts: str) -> list[tuple[list[int], str]]:
    queues = {
        rank: deque(Item("stdout", list(piece)) for piece in text.split("|") if piece)
        for rank, text in enumerate(texts)
    }
    shown = [(ranks, str(line)) for ranks, item in merge(queues) for line in item.keys]
    assert not any(queues.values())
    return shown


def test_a_line_of_all_ranks_is_shown_once():
    assert merged("ab", "ab", "ab") == [([0, 1, 2], "a"), ([0, 1, 2], "b")]


def test_a_line_of_one_rank_does_not_split_the_lines_of_the_others():
    assert merged("ab", "axb") == [([0, 1], "a"), ([1], "x"), ([0, 1], "b")]


def test_different_lines_are_shown_under_their_ranks():
    assert merged("a", "b") == [([0], "a"), ([1], "b")]


def test_equal_lines_of_different_streams_are_not_merged():
    queues = {0: deque([Item("stdout", ["a"])]), 1: deque([Item("stderr", ["a"])])}
    assert [ranks for ranks, _ in merge(queues)] == [[0], [1]]


@given(st.lists(st.text("abc|", max_size=12), min_size=1, max_size=4))
def test_the_order_of_each_ranks_lines_is_kept(texts: list[str]):
    shown = merged(*texts)
    for rank, text in enumerate(texts):
        printed = text.replace("|", "")
        assert "".join(line for ranks, line in shown if rank in ranks) == printed


@given(st.text("abc", max_size=12), st.integers(1, 4))
def test_equal_texts_merge_completely(text: str, ranks: int):
    assert len(merged(*[text] * ranks)) == len(text)


class Counting(str):
    """A line that counts how often a line is looked at."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        Counting.looks += 1
        return super().__eq__(other)

    def __hash__(self) -> int:
        Counting.looks += 1
        return super().__hash__()


LINES = 10_000


@pytest.mark.parametrize(
    "texts",
    [
        [[f"{rank} {i}" for i in range(LINES)] for rank in range(4)],
        [[f"{i}" for i in range(LINES)]] * 4,
        [["step"] * LINES] * 4,
        [["done"]]
        + [[*(f"{rank} {i}" for i in range(LINES)), "done"] for rank in (1, 2)],
    ],
    ids=["each its own", "all the same", "one line", "one rank waits"],
)
def test_merging_takes_linear_time(texts: list[list[str]]):
    queues = {
        rank: deque([Item("stdout", [Counting(line) for line in text])])
        for rank, text in enumerate(texts)
    }
    Counting.looks = 0
    shown = list(merge(queues))
    assert len(shown) <= LINES
    assert Counting.looks < 14 * sum(map(len, texts))


def test_lines_of_one_rank_are_shown_in_one_piece():
    queues = {
        rank: deque([Item("stdout", [f"{rank} {i}" for i in range(LINES)])])
        for rank in range(4)
    }
    assert [ranks for ranks, _ in merge(queues)] == [[0], [1], [2], [3]]


@given(st.lists(st.text("ab\n", max_size=6)))
def test_lines_do_not_depend_on_the_chunks_of_the_text(pieces: list[str]):
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    assert "\n".join([*lines, splitter.unfinished]) == "".join(pieces)


@given(st.lists(st.text("ab\r\n", max_size=6)))
def test_carriage_returns_do_not_depend_on_the_chunks_of_the_text(pieces: list[str]):
    at_once, in_pieces = LineSplitter(), LineSplitter()
    expected = list(at_once.feed("".join(pieces)))
    actual = [line for piece in pieces for line in in_pieces.feed(piece)]
    assert actual == expected


def test_a_carriage_return_restarts_the_line():
    splitter = LineSplitter()
    assert list(splitter.feed("10%\r20%")) == []
    assert splitter.unfinished == "20%"
    assert list(splitter.feed("\r100%\ndone\r\n")) == ["100%", "done"]
    assert splitter.unfinished == ""
