"""The progress of loops whose iterators count."""

from __future__ import annotations

from operator import attrgetter

import pytest

from nbdist.telemetry import loops
from nbdist.telemetry.loops import Loops


class Counting:
    count = 0


DONE = attrgetter("count")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, which the test sets."""
    now = [100.0]
    monkeypatch.setattr(loops.time, "monotonic", lambda: now[0])
    return now


def shown(followed: Loops) -> tuple[int, int] | None:
    progress = followed.progress()
    return None if progress is None else (progress.done, progress.total)


def test_the_outer_loop_is_shown_while_it_makes_steps(clock: list[float]):
    followed, outer = Loops(), Counting()
    followed.begin(outer, DONE, 50)
    for step in range(1, 5):
        outer.count = step
        inner = Counting()
        followed.begin(inner, DONE, 3)
        inner.count = 1
        assert shown(followed) == (step, 50)
        clock[0] += 9.0
    long = Counting()
    followed.begin(long, DONE, 900)
    clock[0] += 5.0
    long.count = 7
    assert shown(followed) == (7, 900)  # the outer one waits for it
    outer.count += 1
    assert shown(followed) == (5, 50)


def test_a_loop_that_has_ended_or_was_left_is_not_shown(clock: list[float]):
    followed, first, second = Loops(), Counting(), Counting()
    assert shown(followed) is None
    followed.begin(first, DONE, 2)
    followed.begin(second, DONE, 5)
    assert shown(followed) == (0, 2)
    first.count = 2
    assert shown(followed) == (0, 5)
    del second
    assert shown(followed) is None
    followed.begin(first, DONE, 2)  # the same iterator, which begins again
    first.count = 1
    assert shown(followed) == (1, 2)
    followed.clear()
    assert shown(followed) is None


def test_an_iterator_that_is_kept_does_not_hide_another(clock: list[float]):
    followed, kept, other = Loops(), Counting(), Counting()
    followed.begin(kept, DONE, 500)
    kept.count = 1
    assert shown(followed) == (1, 500)
    clock[0] += 11.0
    followed.begin(other, DONE, 30)
    other.count = 4
    assert shown(followed) == (4, 30)
