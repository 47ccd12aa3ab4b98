"""SIGINT on a rank: it reaches the user's code, and nothing else."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupts"]


class Interrupts:
    """Turns SIGINT into KeyboardInterrupt while user code runs; ignores it otherwise.

    A SIGINT that comes between two requests must not hit the kernel's own machinery,
    for then a reply would be lost and the notebook would wait for it.
    """

    def __init__(self) -> None:
        self._armed = False
        self._waiting: asyncio.Task[object] | None = None

    def install(self) -> None:
        """Take SIGINT over. Call from the main thread."""
        signal.signal(signal.SIGINT, self._on_sigint)

    @contextmanager
    def armed(self, task: asyncio.Task[object] | None = None) -> Iterator[None]:
        """Let SIGINT through; give the task when user code runs as a coroutine."""
        self._waiting = task
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
            self._waiting = None

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        if not self._armed:
            return
        task = self._waiting
        if task is None:
            raise KeyboardInterrupt
        loop = task.get_loop()
        if asyncio.current_task(loop) is task:
            raise KeyboardInterrupt
        # The loop is idle or runs something else: raising there would end the loop.
        loop.call_soon_threadsafe(task.cancel)
