"""The thread that runs a group's asynchronous collectives, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from nbdist.collectives.handle import Handle
from nbdist.ipc.locks import Event

__all__ = ["Worker"]

Job = tuple[Callable[[], None], Handle]


class Worker:
    """Runs jobs in one daemon thread, which starts with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._end: BaseException | None = None
        """The error of jobs that are submitted after `stop`."""
        self.last: Handle | None = None
        """The handle of the last job; None before the first."""

    @property
    def busy(self) -> bool:
        """Whether a job is waiting or running."""
        return self.last is not None and not self.last.is_completed()

    @property
    def is_current(self) -> bool:
        """Whether the caller is this worker's thread."""
        return threading.current_thread() is self._thread

    def submit(self, body: Callable[[], None], handle: Handle) -> Handle:
        """Run `body` after all earlier jobs, and complete `handle` at its end.

        After `stop`, the handle ends with the error of `stop`.
        """
        with self._lock:
            if self._end is not None:
                handle.complete(self._end)
                return handle
            # An interrupt may have left a thread that was not started.
            if self._thread is None or self._thread.ident is None:
                self._thread = threading.Thread(
                    target=self._run, name=self._name, daemon=True
                )
                self._thread.start()
            self.last = handle
            self._jobs.put((body, handle))
        return handle

    def drain(self) -> None:
        """Wait until all jobs have ended. A job must not call this."""
        last = self.last
        if last is not None:
            ended = Event()
            last.add_done_callback(lambda _: ended.set())
            ended.wait()

    def stop(self, error: BaseException) -> None:
        """End the thread after the submitted jobs. Safe to call twice.

        Args:
            error: The error of later jobs, which are not run.
        """
        with self._lock:
            self._end = error
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            body, handle = job
            try:
                body()
            except BaseException as error:  # noqa: BLE001 - the waiter raises it
                handle.complete(error)
            else:
                handle.complete()
            del job, body, handle  # frees the tensors while idle
