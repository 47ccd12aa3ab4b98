"""Equal failures of several ranks are shown once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbdist.clusters.failures import group, render, summary
from nbdist.wire import Failure


def failure(rank: int, text: str = "boom", line: str = "x / 0", host: str = "a"):
    shown = (f"\x1b[31mValueError\x1b[39m {line}",)
    return Failure(rank, host, "ValueError", text, traceback=shown)


def test_equal_failures_are_shown_once_with_their_ranks_and_hosts():
    failures = [failure(3, host="b"), failure(0), failure(1), failure(2, "other")]
    assert [[f.rank for f in alike] for alike in group(failures)] == [[0, 1, 3], [2]]
    assert summary(failures, 4).splitlines() == [
        "ranks 0-1,3 of 4: ValueError: boom",
        "rank 2 of 4: ValueError: other",
    ]
    text = "\n".join(render(failures, 4))
    assert text.count("x / 0") == 2
    assert "ranks 0-1,3 of 4 on a, b" in text


def test_failures_of_different_lines_are_shown_apart():
    assert len(group([failure(0, line="line 3"), failure(1, line="line 4")])) == 2


def test_failures_that_differ_in_colours_are_equal():
    plain = Failure(1, "a", "ValueError", "boom", traceback=("ValueError x / 0",))
    assert len(group([failure(0), plain])) == 1


def test_a_failure_without_a_traceback_is_shown_by_its_message():
    text = "\n".join(render([Failure(1, "a", "RankDied", "rank 1 has died")], 2))
    assert "rank 1 has died" in text


@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from("xyz")), unique=True))
def test_every_rank_is_in_exactly_one_group(pairs: list[tuple[int, str]]):
    failures = [failure(rank, text) for rank, text in pairs]
    grouped = [(f.rank, f.evalue) for alike in group(failures) for f in alike]
    assert sorted(grouped) == sorted(pairs)
    assert len(group(failures)) == len({text for _, text in pairs})
