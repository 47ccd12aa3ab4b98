"""What operations of the torch.distributed backend give back."""

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
"""What ended the last future that failed."""


def original_error(error: BaseException) -> BaseException:
    """The error that C++ has turned into this one, where it has; else `error` itself.

    A future's error comes through C++, as from DDP's backward, as a RuntimeError with
    the text of the original.
    """
    last = _last_error
    if last is not None and type(error) is RuntimeError and str(last) in str(error):
        return last
    return error


def in_callback() -> bool:
    """Whether this thread runs callbacks of a future that a call has just completed.

    A collective that is begun there must be run there and then: its place is between
    the call that has ended and the next one, on all ranks, whatever else is queued.
    """
    return getattr(_completing, "now", False)


class CollectiveWork(dist.Work):
    """A collective, under way or done. Waiting for it lets KeyboardInterrupt through.

    C++ waits by `get_future`, as DDP's reducer does: that wait ends with the call, so
    also when the group is aborted from another thread.
    """

    def __init__(self, handle: Handle | None, tensors: Sequence[Tensor]) -> None:
        """Make it from what a collective returned.

        Args:
            handle: the asynchronous call; None for one that is done.
            tensors: where its result lies.
        """
        super().__init__()
        self._handle = handle
        self._tensors = list(tensors)
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the result is in place; raises what ended the call otherwise."""
        return self._handle is None or self._handle.wait(timeout)

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as `wait`: it is the host that waits here."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._handle is None or self._handle.is_completed()

    def is_success(self) -> bool:
        """Whether the result is in place."""
        return self._handle is None or self._handle.is_success()

    def exception(self) -> BaseException | None:
        """What ended the call; None while it is under way or when it went well."""
        return None if self._handle is None else self._handle.exception()

    def result(self) -> list[Tensor]:
        """The tensors that the call writes to."""
        return self._tensors

    def get_future(self) -> Future[Any]:
        """A future of `result()`. It fails with the text of what ended the call."""
        if self._future is None:
            # Its callbacks may queue work: on streams of these devices, which whoever
            # waits for the future is ordered after.
            ended: Future[None] = Future(devices=_devices(self._tensors))
            # Future.set_exception sets no error that C++ sees. One that is raised in
            # a callback is seen.
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
    """A message under way. It moves while somebody waits."""

    def __init__(self, message: Message, timeout: timedelta) -> None:
        super().__init__()
        self._message = message
        self._timeout = timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor may be used again."""
        return self._message.wait(timeout or self._timeout)

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as `wait`: it is the host that waits here."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the message has left, or has arrived."""
        return self._message.is_completed()

    def is_success(self) -> bool:
        """The same as `is_completed`: a message that fails raises."""
        return self.is_completed()

    def _source_rank(self) -> int:
        """The sender's rank in the group."""
        assert self._message.source is not None, "wait first"
        return self._message.source


class WorkList(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for each in turn, up to `timeout` each."""
        for work in self._works:
            work.wait(timeout or timedelta(0))
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as `wait`: it is the host that waits here."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all have ended well."""
        return all(work.is_success() for work in self._works)

    def result(self) -> list[Tensor]:
        """The tensors of all."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Future[Any]:
        """A future of `result()`."""
        every = collect_all([work.get_future() for work in self._works])
        return every.then(self._outcome)

    def _outcome(self, every: Future[list[Future[Any]]]) -> list[Tensor]:
        for future in every.value():
            future.value()  # raises what ended it
        return self.result()
