"""Locks that an interrupt does not leave held."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from types import FrameType

import pytest

from nbdist.ipc.interrupts import interrupt, is_entering
from nbdist.ipc.locks import Condition, Event, Future, await_all
from tests.processes import HANG_S
from tests.seed import SEED

INTERRUPTS = 3000
SENDER = f"""
import os, random, time
draw = random.Random({SEED})
while True:
    time.sleep(draw.random() * 3e-4)
    os.kill({{pid}}, {signal.SIGINT.value})
"""


class _Interrupter:
    """Interrupts steps of the main thread at random moments, from another process.

    A thread of this process would send its signals only where the main thread waits.
    """

    def __init__(self) -> None:
        self.count = 0
        self._is_armed = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = is_entering(frame)
            interrupt(number, frame)

    def run(self, step: Callable[[], object]) -> None:
        """Repeat the step until it has been interrupted once."""
        try:
            self._is_armed = True
            while True:
                step()
        except KeyboardInterrupt:
            self.count += 1


@pytest.fixture
def interrupter() -> Iterator[_Interrupter]:
    interrupter = _Interrupter()
    before = signal.signal(signal.SIGINT, interrupter.handle)
    code = SENDER.format(pid=os.getpid())
    sender = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield interrupter
    finally:
        sender.kill()
        sender.wait(HANG_S)
        signal.signal(signal.SIGINT, before)


@contextmanager
def _other_thread(use: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """A function that has another thread use a lock, and fails if that takes long."""
    asked, used = threading.Semaphore(0), threading.Semaphore(0)
    has_ended = False

    def serve() -> None:
        while True:
            asked.acquire()
            if has_ended:
                return
            use()
            used.release()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()

    def check() -> None:
        asked.release()
        assert used.acquire(timeout=HANG_S), "the lock is held"

    yield check
    has_ended = True
    asked.release()
    thread.join(HANG_S)


def _on_condition(
    lock: threading.Lock | None = None,
) -> tuple[Callable[[], object], Callable[[], object]]:
    condition = Condition(lock)

    def step() -> None:
        for _ in range(9):
            with condition:
                pass
        with condition:
            condition.wait(0)

    def use() -> None:
        with condition:
            condition.notify_all()

    return step, use


def _on_lock() -> tuple[Callable[[], object], Callable[[], object]]:
    return _on_condition(threading.Lock())


def _on_event() -> tuple[Callable[[], object], Callable[[], object]]:
    event = Event()

    def step() -> None:
        for _ in range(9):
            event.clear()
        event.wait(0)

    return step, event.set


def _on_future() -> tuple[Callable[[], object], Callable[[], object]]:
    future: Future[int] = Future()

    def step() -> None:
        assert not future.done()
        assert not await_all([future], 0)

    return step, future.done


@pytest.mark.parametrize("make", [_on_condition, _on_lock, _on_event, _on_future])
def test_an_interrupt_leaves_no_lock_held(
    interrupter: _Interrupter,
    make: Callable[[], tuple[Callable[[], object], Callable[[], object]]],
):
    # KeyboardInterrupt is raised, and never an error of the lock.
    step, use = make()
    with _other_thread(use) as check:
        while interrupter.count < INTERRUPTS:
            interrupter.run(step)
            check()


def test_a_condition_waits_until_it_is_notified():
    condition, values = Condition(), []

    def put() -> None:
        for value in range(3):
            with condition:
                values.append(value)
                condition.notify()

    with condition:
        threading.Thread(target=put, daemon=True).start()
        assert condition.wait_for(lambda: len(values) == 3, HANG_S)
        assert not condition.wait(0.01)  # nobody notifies it any more
        assert not condition.wait(-1)


def test_the_lock_of_a_condition_may_be_held_twice():
    condition, has_come = Condition(), []

    def notify() -> None:
        with condition:
            has_come.append(True)
            condition.notify_all()

    with condition, condition:
        threading.Thread(target=notify, daemon=True).start()
        assert condition.wait_for(lambda: has_come, HANG_S)
    with pytest.raises(RuntimeError):
        condition.release()


def test_the_standard_library_can_wait_for_a_future():
    first, second = Future(), Future()
    assert not await_all([first, second], 0.01)
    with futures.ThreadPoolExecutor(1) as pool:
        pool.submit(first.set_result, 1)
        assert futures.wait([first, second], HANG_S, "FIRST_COMPLETED").done == {first}
        assert second.cancel()
        assert await_all([first, second], None)
        pool.submit(first.result).result(HANG_S)


def test_a_wait_for_futures_ends_in_time():
    pending, since = [Future() for _ in range(5)], time.monotonic()
    assert not await_all(pending, 0.2)
    assert time.monotonic() >= since + 0.2
