"""An interrupt within `defer_interrupts` is delivered at the end of the block."""

from __future__ import annotations

import _thread
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from nbdist.ipc.interrupts import defer_interrupts, interrupt
from tests.processes import HANG_S


def press(then: Callable[[], object]) -> None:
    """Interrupt this process in the block, and call `then` in the rest of the block."""
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        then()


def test_an_interrupt_is_delivered_at_the_end() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        press(lambda: done.append("the rest"))
    assert done == ["the rest"]


def test_an_interrupt_is_delivered_after_an_error() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        press(lambda: 1 // 0)
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_the_signal_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with defer_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_the_block_has_no_effect() -> None:
    seen = []

    def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        with defer_interrupts():
            seen.append(signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [True]


def test_on_interrupt_is_called_at_each_interrupt() -> None:
    asked: list[int] = []

    def press_twice() -> None:
        with defer_interrupts(lambda: asked.append(len(asked))):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert asked == [0, 1]


class Interrupted:
    """Interrupts the main thread in the call of `__enter__`."""

    __enter__ = staticmethod(_thread.interrupt_main)

    def __init__(self) -> None:
        self.has_left = False

    def __exit__(self, *_error: object) -> None:
        self.has_left = True


def test_a_block_that_was_entered_is_left() -> None:
    before = signal.signal(signal.SIGINT, interrupt)
    block = Interrupted()
    try:
        with pytest.raises(KeyboardInterrupt), block:
            threading.Event().wait(HANG_S)
    finally:
        signal.signal(signal.SIGINT, before)
    assert block.has_left


NOTEBOOK = """
import signal, threading
import ipykernel.kernelbase as kernelbase
from nbdist import Cluster
from tests.ipc.test_interrupts import Interrupted
Cluster.stop(Cluster(1, device="cpu").start())
for handler in (signal.getsignal(signal.SIGINT), kernelbase.default_int_handler):
    signal.signal(signal.SIGINT, handler)
    block = Interrupted()
    try:
        with block:
            threading.Event().wait(60)
    except KeyboardInterrupt:
        print(block.has_left)
"""


def test_a_notebook_leaves_what_it_has_entered() -> None:
    program = [sys.executable, "-c", NOTEBOOK]
    run = subprocess.run(program, capture_output=True, text=True, timeout=2 * HANG_S)
    assert run.stdout.split() == ["True", "True"], run.stderr
