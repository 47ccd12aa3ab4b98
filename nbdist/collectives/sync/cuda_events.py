"""Orders the work of one rank's device before that of another's.

A queued kernel must not read memory that another rank's device has yet to write. The
device never waits for another process: a killed rank may never record its event, and a
stream that waits for it cannot be released. The host waits instead.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from nbdist.collectives.sync.cuda_peers import Events, keep_events
from nbdist.collectives.sync.wait import Check, wait_until

__all__ = [
    "EventOrder",
    "HostOrder",
    "Order",
    "await_device",
    "on_side_stream",
    "settle",
]

_LONGEST_PAUSE_S = 50e-6
"""Between two queries of a device. A step of a collective takes about 100 us."""


class Order(ABC):
    """Called around each barrier."""

    @abstractmethod
    def before(self) -> None:
        """Called before the barrier: announce the work that this rank has queued."""

    @abstractmethod
    def after(self) -> None:
        """Called after the barrier: wait for the work that all ranks have announced."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free what the order holds. Safe to call twice."""


class _DeviceOrder(Order):
    def __init__(self, check: Check) -> None:
        self._check = check
        self._stream: torch.cuda.Stream | None = None
        """The stream of this rank's last step."""

    def before(self) -> None:
        current = torch.cuda.current_stream()
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)  # its reads come first
        self._stream = current

    def close(self) -> None:
        if self._stream is not None:
            # Queued work may still read memory that is freed next.
            with contextlib.suppress(RuntimeError):  # the device itself has failed
                self._stream.synchronize()
            self._stream = None


class EventOrder(_DeviceOrder):
    """Each rank records an interprocess event, and queries those of all ranks.

    Even and odd steps have an event each. A rank that is a step ahead records the other
    one, and cannot be further ahead before all ranks have queried the first.
    """

    def __init__(self, mine: Events, theirs: Sequence[Events], check: Check) -> None:
        super().__init__(check)
        self._mine: Events | None = mine
        self._theirs = theirs
        self._step = 0

    def before(self) -> None:
        super().before()
        assert self._mine is not None  # a closed group makes no calls
        self._mine[self._step & 1].record(self._stream)

    def after(self) -> None:
        assert self._mine is not None
        # Also this rank's own: the next call may use a stream that is not ordered after
        # the reads of this one.
        for events in (self._mine, *self._theirs):
            await_device(events[self._step & 1].query, self._check)
        self._step += 1

    def close(self) -> None:
        super().close()
        if self._mine is not None:
            keep_events(self._mine)
        self._mine, self._theirs = None, ()


class HostOrder(_DeviceOrder):
    """Each host waits for its device before the barrier. It needs no shared events."""

    def before(self) -> None:
        super().before()
        settle(self._check)

    def after(self) -> None:
        pass


def settle(check: Check) -> None:
    """Wait for the work queued on the current stream.

    Args:
        check: called while waiting; ends the wait by raising.
    """
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream())
    await_device(done.query, check)


def await_device(done: Callable[[], bool], check: Check) -> None:
    """Wait until `done`, which queries a device. `check` ends the wait by raising."""
    wait_until(done, check, longest_pause_s=_LONGEST_PAUSE_S)


def on_side_stream(body: Callable[[], object], check: Check) -> Callable[[], None]:
    """A function for another thread that runs `body` as c10d runs an asynchronous call.

    Its work is ordered after the work queued on the caller's current stream. It returns
    when its work is done on the device, so that its tensors, which belong to the
    caller's stream, are not freed too soon, and any stream can use the result.

    Args:
        body: queues work on the stream that is current.
        check: called while waiting; ends the wait by raising.
    """
    caller = torch.cuda.current_stream()
    side = torch.cuda.Stream(caller.device)
    ready = caller.record_event()

    def run() -> None:
        with torch.cuda.stream(side):
            side.wait_event(ready)
            try:
                body()
                settle(check)
            except BaseException:
                # The tensors may be freed at once: work of the caller's stream on the
                # same memory must come after the work of this one.
                caller.wait_stream(side)
                raise

    return run
