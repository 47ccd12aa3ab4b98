"""What makes the work of one rank's device come before that of another's.

A kernel that is queued here must not read what another rank's device has yet to write.
The device itself never waits for another process: an event of a rank that is killed may
never come, and a stream that waits for it could not be released. The host waits, and
can be.
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
"""Between two looks at a device: a step of a collective takes some 100 microseconds."""


class Order(ABC):
    """Called around each meeting of the ranks."""

    @abstractmethod
    def before(self) -> None:
        """What this rank has queued is to be done before others go on."""

    @abstractmethod
    def after(self) -> None:
        """All ranks have met: return once what they announced is done."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what it holds. Safe to call twice."""


class _DeviceOrder(Order):
    def __init__(self, check: Check) -> None:
        self._check = check
        self._stream: torch.cuda.Stream | None = None
        """Where this rank has queued its last step."""

    def before(self) -> None:
        current = torch.cuda.current_stream()
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)  # it may still read what comes next here
        self._stream = current

    def close(self) -> None:
        if self._stream is not None:
            # What is queued there may still read the memory that is given back next.
            with contextlib.suppress(RuntimeError):  # the device itself has failed
                self._stream.synchronize()
            self._stream = None


class EventOrder(_DeviceOrder):
    """Each rank records an interprocess event, and looks at everybody's.

    There is one for even and one for odd steps: a rank that is a step ahead records the
    other one, and can be no further ahead before all have looked at the first.
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
        # Also this rank's own: the next call may come on a stream that knows nothing of
        # what this one still reads.
        for events in (self._mine, *self._theirs):
            await_device(events[self._step & 1].query, self._check)
        self._step += 1

    def close(self) -> None:
        super().close()
        if self._mine is not None:
            keep_events(self._mine)
        self._mine, self._theirs = None, ()


class HostOrder(_DeviceOrder):
    """Each rank comes only when its device is done: where events cannot be shared."""

    def before(self) -> None:
        super().before()
        settle(self._check)

    def after(self) -> None:
        pass


def settle(check: Check) -> None:
    """Wait until what is queued on the current stream is done.

    Args:
        check: called meanwhile; ends the wait by raising.
    """
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream())
    await_device(done.query, check)


def await_device(done: Callable[[], bool], check: Check) -> None:
    """Wait for a device: `done` asks it, and `check` ends the wait by raising."""
    wait_until(done, check, longest_pause_s=_LONGEST_PAUSE_S)


def on_side_stream(body: Callable[[], object], check: Check) -> Callable[[], None]:
    """A body for another thread, ordered as c10d orders an asynchronous collective.

    It comes after the work now queued on the caller's current stream. It returns when
    its own work is done on the device: so the tensors that it holds, which belong to
    the caller's stream, are not given back too soon, and whoever learns that the call
    has ended can use the result on any stream.

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
                # The tensors may be given back at once: what the caller's stream puts
                # in their place must come after what this one still does to them.
                caller.wait_stream(side)
                raise

    return run
