"""Orders the work of the ranks' devices.

A kernel must not read memory before another rank's device has written it. A device
never waits for another process, because a killed rank may never record its event, and a
stream that waits for the event cannot be released. The host waits instead.
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
"""Longest pause between two queries of a device. A step takes about 100 us."""


class Order(ABC):
    """Orders the devices at each barrier of a group."""

    @abstractmethod
    def before(self) -> None:
        """Announce the work that this rank has queued. Called before each barrier."""

    @abstractmethod
    def after(self) -> None:
        """Wait for the announced work of all ranks. Called after each barrier."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free the events. Safe to call twice."""


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
            # Queued work may still read the memory that is freed after this.
            with contextlib.suppress(RuntimeError):  # the device itself has failed
                self._stream.synchronize()
            self._stream = None


class EventOrder(_DeviceOrder):
    """Each rank records an interprocess event, and queries the events of all ranks.

    Even and odd steps have different events. A rank can be one step ahead of another,
    and then records the other event. It cannot be two steps ahead, because the barrier
    lets no rank pass before all have queried the first event.
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
        # The host also waits for this rank's own event: the next call may use a stream
        # that is not ordered after the reads of this call.
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
    """Wrap `body` for another thread, on a side stream, as c10d does.

    The work of `body` is ordered after the work queued on the caller's current stream.
    The returned function ends when that work is done on the device. So the tensors,
    which belong to the caller's stream, are not freed too soon, and any stream can use
    the result.

    Args:
        body: queues work on the current stream.
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
                # The tensors may be freed now. Work of the caller's stream on the same
                # memory must come after the work of the side stream.
                caller.wait_stream(side)
                raise

    return run
