"""The pacer sends fast while it is acknowledged, and slowly otherwise."""

from __future__ import annotations

import pytest

from nbdist.widgets.pacing import LONGEST_S, SHORTEST_S, Pacer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pacer(clock: Clock) -> Pacer:
    return Pacer(clock)


def test_a_front_end_that_acknowledges_gets_ten_messages_a_second(
    pacer: Pacer, clock: Clock
) -> None:
    assert pacer.next_is_complete()
    for _ in range(100):
        pacer.sent()
        clock.now += 0.5
        pacer.acknowledged()
        assert pacer.delay_s(1000) == SHORTEST_S
        assert not pacer.next_is_complete()


def test_large_messages_are_sent_less_often(pacer: Pacer) -> None:
    assert pacer.delay_s(8_000_000) == 2.0


def test_messages_are_rarer_the_longer_no_acknowledgement_comes(
    pacer: Pacer, clock: Clock
) -> None:
    pacer.sent()
    delays, messages = [], 0
    while clock.now < 100 + 12 * 3600:
        delay = pacer.delay_s(1000)
        delays.append(delay)
        clock.now += delay
        pacer.sent()
        messages += 1
    assert delays[0] == SHORTEST_S
    assert delays == sorted(delays)
    assert delays[-1] == LONGEST_S
    assert messages < 12 * 3600 / LONGEST_S + 2000


def test_idle_ranks_do_not_count_as_missing_acknowledgements(
    pacer: Pacer, clock: Clock
) -> None:
    pacer.sent()
    pacer.acknowledged()
    clock.now += 3600
    pacer.sent()
    assert pacer.delay_s(1000) == SHORTEST_S


def test_a_request_is_answered_once(pacer: Pacer) -> None:
    assert pacer.next_is_complete()
    assert not pacer.next_is_complete()
    pacer.ask()
    assert pacer.next_is_complete()
    assert not pacer.next_is_complete()


def test_a_front_end_that_has_acknowledged_gets_the_whole_history_after_a_minute(
    pacer: Pacer, clock: Clock
) -> None:
    pacer.next_is_complete()
    pacer.sent()
    pacer.acknowledged()
    pacer.sent()
    clock.now += 59
    assert not pacer.next_is_complete()
    clock.now += 2
    assert pacer.next_is_complete()


def test_without_acknowledgements_the_history_is_repeated_ever_more_rarely(
    pacer: Pacer, clock: Clock
) -> None:
    pacer.next_is_complete()
    pacer.sent()
    whole = 0
    for _ in range(36_000):
        clock.now += 0.1
        whole += pacer.next_is_complete()
    assert 10 < whole < 20
