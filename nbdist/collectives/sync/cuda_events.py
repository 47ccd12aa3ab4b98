"""Orders the work of the ranks' GPUs.

A kernel must not read memory before another rank's GPU has written it. No stream waits
for another process's event: a rank that is killed may never record it, and a waiting
stream cannot be released. The host waits instead.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from nbdist.collectives.sync.cuda_peers import Events, keep_events
from nbdist.collectives.sync.wait import Check, wait_until
from nbdist.ipc.gpu_threads import own_stream, relax_captures

__all__ = [
    "EventOrder",
    "HostOrder",
    "Order",
    "await_device",
    "on_side_stream",
    "settle",
]

_LONGEST_PAUSE_S = 50e-6
"""Longest pause between two queries of an event. A step takes about 100 us."""


class Order(ABC):
    """Orders the GPUs' work at each barrier of a group."""

    @abstractmethod
    def before(self) -> None:
        """Mark the work that this rank has queued. Called before each barrier."""

    @abstractmethod
    def after(self) -> None:
        """Wait for the marked work of all ranks. Called after each barrier."""

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
            current.wait_stream(self._stream)  # the last step's reads come first
        self._stream = current

    def close(self) -> None:
        if self._stream is not None:
            # The caller frees memory that queued work may still read.
            with contextlib.suppress(RuntimeError):  # the GPU has failed
                self._stream.synchronize()
            self._stream = None


class EventOrder(_DeviceOrder):
    """Each rank records an interprocess event, and queries the events of all ranks.

    Even and odd steps have different events, because a rank can be one step ahead of
    another. It cannot be two steps ahead: the barrier of the next step lets no rank
    pass before all ranks have queried the events of this step.
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
        # This includes this rank's own event: the next call may use another stream,
        # which is not ordered after the reads of this call.
        for events in (self._mine, *self._theirs):
            await_device(events[self._step & 1].query, self._check)
        self._step += 1

    def close(self) -> None:
        super().close()
        if self._mine is not None:
            keep_events(self._mine)
        self._mine, self._theirs = None, ()


class HostOrder(_DeviceOrder):
    """Each rank's host waits for its GPU before the barrier. No events are shared."""

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
    """Wait until `done()`, which queries a GPU. `check` ends the wait by raising."""
    # A query holds the interpreter, which other threads need while the GPU works.
    wait_until(done, check, longest_pause_s=_LONGEST_PAUSE_S, spins=1)


def on_side_stream(body: Callable[[], object], check: Check) -> Callable[[], None]:
    """Wrap `body` so that another thread can run it on a side stream.

    The work of `body` runs after the work queued on the caller's current stream. The
    returned function returns when that work is done on the GPU. Its tensors, which
    belong to the caller's stream, are therefore not freed too soon, and any stream can
    use the result.

    Args:
        body: queues work on the current stream.
        check: called while waiting; ends the wait by raising.

    Returns:
        A function that calls `body` and waits for its work.
    """
    caller = torch.cuda.current_stream()
    side = own_stream(caller.device)
    ready = caller.record_event()

    def run() -> None:
        with torch.cuda.stream(side):
            relax_captures()
            side.wait_event(ready)
            try:
                body()
                settle(check)
            except BaseException:
                # The tensors may be freed now. The caller's stream must not use their
                # memory before the work of the side stream is done.
                caller.wait_stream(side)
                raise

    return run
