"""Work that no interrupt may cut."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["shielded"]

T = TypeVar("T")


def shielded(work: Callable[[], T], on_interrupt: Callable[[], None]) -> T:
    """Do something on a thread, so that an interrupt does not cut it at any point.

    Args:
        on_interrupt: Called at each KeyboardInterrupt; asks the work to end soon, in
            an orderly way. The interrupt is raised once it has.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="nbdist-recovery", daemon=True)
    thread.start()
    interrupted: KeyboardInterrupt | None = None
    while not outcome.done():
        try:
            outcome.exception()
        except KeyboardInterrupt as interrupt:
            interrupted = interrupt
            on_interrupt()
    if interrupted is not None:
        raise interrupted
    return outcome.result()
