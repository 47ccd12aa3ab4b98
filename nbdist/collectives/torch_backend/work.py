"""The `Work` objects that operations of the torch.distributed backend return."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all

from nbdist.collectives.handle import Handle
from nbdist.collectives.mailbox import Message

__all__ = [
    "CollectiveWork",
    "MessageWork",
    "WorkList",
    "in_callback",
    "original_error",
]

_completing = threading.local()
_last_error: BaseException | None = None
"""The error of the last future that failed."""


def original_error(error: BaseException) -> BaseException:
    """The original of an error that C++ has raised again; else `error` itself.

    C++ code that waits for a future, such as DDP's backward, raises the future's error
    as a RuntimeError with the same text.
    """
    last = _last_error
    if last is not None and type(error) is RuntimeError and str(last) in str(error):
        return last
    return error


def in_callback() -> bool:
    """Whether this thread runs the callbacks of a future that a call has completed.

    A collective that starts in a callback must also run in it. Only then is it between
    the same two calls on all ranks, because ranks may have queued different calls.
    """
    return getattr(_completing, "now", False)


class CollectiveWork(dist.Work):
    """The work of one collective. `wait` can raise KeyboardInterrupt.

    C++ code, such as DDP's reducer, waits for the future of `get_future`. The future
    completes when the call ends, also when another thread aborts the group.
    """

    def __init__(self, handle: Handle | None, tensors: Sequence[Tensor]) -> None:
        """Make the work of one collective.

        Args:
            handle: the asynchronous call; None if the call has ended.
            tensors: the tensors that the call writes to.
        """
        super().__init__()
        self._handle = handle
        self._tensors = list(tensors)
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result. Raises the error of a call that failed."""
        return self._handle is None or self._handle.wait(timeout)

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as `wait`: the host waits, and not the stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended, with success or an error."""
        return self._handle is None or self._handle.is_completed()

    def is_success(self) -> bool:
        """Whether the result is in place."""
        return self._handle is None or self._handle.is_success()

    def exception(self) -> BaseException | None:
        """The error of the call; None while it runs and after success."""
        return None if self._handle is None else self._handle.exception()

    def result(self) -> list[Tensor]:
        """The tensors that the call writes to."""
        return self._tensors

    def get_future(self) -> Future[Any]:
        """A future of `result()`. It fails with the text of the call's error."""
        if self._future is None:
            # Callbacks may queue work on streams of these devices. Code that waits for
            # the future is ordered after that work.
            ended: Future[None] = Future(devices=_devices(self._tensors))
            # C++ does not see an error set by Future.set_exception. It sees one that a
            # callback raises.
            self._future = ended.then(self._outcome)
            if self._handle is None:
                ended.set_result(None)
            else:
                self._handle.add_done_callback(lambda _: _complete(ended))
        return self._future

    def _outcome(self, _: Future[None]) -> list[Tensor]:
        global _last_error
        error = self.exception()
        if error is not None:
            _last_error = error
            raise error
        return self._tensors


def _devices(tensors: Sequence[Tensor]) -> list[int | str | torch.device]:
    return list({each.device for each in tensors if each.is_cuda})


def _complete(ended: Future[None]) -> None:
    before, _completing.now = in_callback(), True
    try:
        ended.set_result(None)  # runs the callbacks
    finally:
        _completing.now = before


class MessageWork(dist.Work):
    """The work of one point-to-point message. It moves while a thread waits for it."""

    def __init__(self, message: Message, timeout: timedelta) -> None:
        super().__init__()
        self._message = message
        self._timeout = timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has been sent or received."""
        return self._message.wait(timeout or self._timeout)

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as `wait`: the host waits, and not the stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the message has been sent or received."""
        return self._message.is_completed()

    def is_success(self) -> bool:
        """The same as `is_completed`, because `wait` raises if the message fails."""
        return self.is_completed()

    def _source_rank(self) -> int:
        """The sender's rank in the group."""
        assert self._message.source is not None, "the message has not arrived"
        return self._message.source


class WorkList(dist.Work):
    """Several works that are waited for together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for each work in turn, each at most `timeout`."""
        for work in self._works:
            work.wait(timeout or timedelta(0))
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as `wait`: the host waits, and not the stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all works have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all works have succeeded."""
        return all(work.is_success() for work in self._works)

    def result(self) -> list[Tensor]:
        """The tensors that the works write to."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Future[Any]:
        """A future of `result()`."""
        every = collect_all([work.get_future() for work in self._works])
        return every.then(self._outcome)

    def _outcome(self, every: Future[list[Future[Any]]]) -> list[Tensor]:
        for future in every.value():
            future.value()  # raises the error of a work that failed
        return self.result()
