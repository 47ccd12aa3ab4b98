"""Events order the work of devices. The test completes the events."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from nbdist.collectives.sync import cuda_events as order
from nbdist.collectives.sync import cuda_peers as peers
from nbdist.errors import CollectiveAborted


class Stream:
    """A CUDA stream without work, which counts the waits for it."""

    def __init__(self) -> None:
        self.waited = 0
        self.after: list[object] = []

    def synchronize(self) -> None:
        self.waited += 1

    def wait_stream(self, other: object) -> None:
        self.after.append(other)


class Event:
    """A CUDA event that `finish` completes."""

    def __init__(self, done: bool = False) -> None:
        self.recorded: list[object] = []
        self.device = torch.device("cuda", 0)
        self.looks = 0
        self._done = threading.Event()
        if done:
            self._done.set()

    def record(self, stream: object) -> None:
        self.recorded.append(stream)

    def query(self) -> bool:
        self.looks += 1
        return self._done.is_set()

    def finish(self) -> None:
        self._done.set()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    current = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    monkeypatch.setattr(peers, "_spare", {})
    return current


def nothing() -> None:
    pass


def test_even_and_odd_steps_have_an_event_each(stream: Stream) -> None:
    mine: Any = (Event(True), Event(True))
    theirs: Any = [(Event(True), Event(True)), (Event(True), Event(True))]
    both = order.EventOrder(mine, theirs, nothing)
    for step in range(4):
        both.before()
        assert [len(each.recorded) for each in mine] == [step // 2 + 1, (step + 1) // 2]
        both.after()
        for events in (mine, *theirs):
            assert events[step & 1].looks == step // 2 + 1
            assert events[1 - step & 1].looks == (step + 1) // 2
    assert mine[0].recorded[0] is stream


def test_a_step_waits_for_every_other_rank(stream: Stream) -> None:
    mine: Any = (Event(True), Event())
    slow = Event()
    theirs: Any = [(Event(True), Event()), (slow, Event())]
    waiting = order.EventOrder(mine, theirs, nothing)
    waiting.before()
    timer = threading.Timer(0.05, slow.finish)
    timer.start()
    waiting.after()
    assert slow.looks > 1
    assert slow.query()
    timer.join()


def test_a_wait_for_an_event_can_be_released(stream: Stream) -> None:
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks > 3:
            raise CollectiveAborted("rank 1 died")

    mine: Any = (Event(True), Event())
    never: Any = [(Event(), Event())]
    waiting = order.EventOrder(mine, never, check)
    waiting.before()
    with pytest.raises(CollectiveAborted, match="rank 1 died"):
        waiting.after()


def test_a_step_that_ended_in_a_mismatch_is_announced_again(stream: Stream) -> None:
    """A mismatch does not advance the step of any rank."""
    mine: Any = (Event(True), Event())
    theirs: Any = [(Event(True), Event(True))]
    both = order.EventOrder(mine, theirs, nothing)
    both.before()
    both.before()
    both.after()
    assert [len(each.recorded) for each in mine] == [2, 0]


def test_a_call_on_another_stream_waits_for_the_previous_call(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine: Any = (Event(True), Event(True))
    both = order.EventOrder(mine, [], nothing)
    both.before()
    both.after()
    both.before()
    assert stream.after == []
    other = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: other)
    both.before()
    both.after()
    assert other.after == [stream]
    own: Any = (Event(), Event())
    late = order.EventOrder(own, [], lambda: own[0].finish())
    late.before()
    late.after()
    assert own[0].looks > 1, "its own device was not waited for"


def test_close_waits_for_queued_work_and_keeps_the_events(stream: Stream) -> None:
    mine: Any = (Event(), Event())
    ended = order.EventOrder(mine, [], nothing)
    ended.close()
    assert stream.waited == 0, "it has queued nothing"
    assert peers._spare == {0: [mine]}
    ended = order.EventOrder(mine, [], nothing)
    ended.before()
    ended.close()
    ended.close()
    assert stream.waited == 1
    assert peers._spare == {0: [mine, mine]}


def test_without_events_the_host_waits_for_the_device_first(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Event] = []

    def make() -> Event:
        made.append(Event(True))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", make)
    alone = order.HostOrder(nothing)
    alone.before()
    assert made[0].recorded == [stream]
    assert made[0].looks == 1
    alone.after()
    alone.close()
    assert stream.waited == 1
