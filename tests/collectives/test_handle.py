"""Handles and the worker that completes them, without ranks."""

from __future__ import annotations

import contextlib
import sys
import threading
from datetime import timedelta
from types import FrameType, SimpleNamespace

import pytest

from nbdist.collectives import Handle
from nbdist.collectives.worker import Worker
from nbdist.errors import CollectiveAborted, CollectiveTimeout
from tests.processes import HANG_S


def test_a_wait_ends_with_the_call() -> None:
    handle = Handle("all_reduce")
    assert not handle.is_completed()
    threading.Thread(target=handle.complete).start()
    assert handle.wait(timedelta(seconds=10))
    assert handle.is_success()
    assert handle.exception() is None


def test_a_wait_raises_the_error_of_the_call() -> None:
    handle = Handle("all_reduce")
    handle.complete(CollectiveAborted("rank 1 died"))
    handle.complete()
    assert handle.is_completed()
    assert not handle.is_success()
    with pytest.raises(CollectiveAborted, match="rank 1 died"):
        handle.wait()


def test_a_wait_can_be_repeated_after_its_timeout() -> None:
    handle = Handle("all_reduce")
    with pytest.raises(CollectiveTimeout, match="all_reduce"):
        handle.wait(0.01)
    handle.complete()
    assert handle.wait(0.01)


def test_an_interrupt_in_a_wait_does_not_keep_the_call_from_ending() -> None:
    handle = Handle("all_reduce")

    def interrupt(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code is not threading.Condition.__enter__.__code__:
            return None
        if event == "return":
            raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt, CollectiveTimeout):
            handle.wait(0.01)
    finally:
        sys.settrace(before)
    ender = threading.Thread(target=handle.complete, daemon=True)
    ender.start()
    ender.join(HANG_S)
    assert not ender.is_alive()
    assert handle.wait()


def test_all_threads_that_wait_for_a_call_see_its_end() -> None:
    handle = Handle("all_reduce")
    begun, news = threading.Semaphore(0), handle._news

    def get(timeout: float | None) -> None:
        begun.release()
        news.get(timeout=timeout)

    handle._news = SimpleNamespace(get=get, put=news.put)  # type: ignore[assignment]
    waiters = [threading.Thread(target=handle.wait, daemon=True) for _ in range(4)]
    for each in waiters:
        each.start()
        assert begun.acquire(timeout=10)
    handle.complete()
    for each in waiters:
        each.join(HANG_S)
        assert not each.is_alive()


def test_a_callback_runs_once_whether_it_is_added_before_or_after_the_end() -> None:
    handle = Handle("all_reduce")
    seen: list[str] = []
    handle.add_done_callback(lambda done: seen.append(f"early {done.is_success()}"))
    handle.complete()
    handle.add_done_callback(lambda done: seen.append("late"))
    assert seen == ["early True", "late"]


def test_the_worker_keeps_the_order_and_continues_after_errors() -> None:
    worker = Worker("test")
    seen: list[int] = []
    gate = threading.Event()
    first = worker.submit(lambda: gate.wait(HANG_S) and seen.append(1), Handle("1"))
    failing = worker.submit(lambda: seen.append(1 // 0), Handle("2"))
    last = worker.submit(lambda: seen.append(3), Handle("3"))
    assert worker.busy
    gate.set()
    worker.drain()
    assert not worker.busy
    assert seen == [1, 3]
    assert first.is_success()
    assert last.is_success()
    assert isinstance(failing.exception(), ZeroDivisionError)
    worker.stop(ValueError("stopped"))


def test_a_stopped_worker_ends_later_jobs_with_an_error() -> None:
    worker = Worker("test")
    gate = threading.Event()
    earlier = worker.submit(lambda: gate.wait(HANG_S), Handle("earlier"))
    worker.stop(ValueError("stopped"))
    ran: list[int] = []
    late = worker.submit(lambda: ran.append(1), Handle("late"))
    with pytest.raises(ValueError, match="stopped"):
        late.wait(HANG_S)
    gate.set()
    assert earlier.wait(HANG_S)
    assert not ran
