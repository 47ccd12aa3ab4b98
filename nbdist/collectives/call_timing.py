"""How long the calls of collectives take, and the bandwidth that they reach.

Calls on a CPU are those of the flight record. A call on a GPU is queued, so that its
time on the host says little. Two CUDA events on the caller's stream have its time:
from the moment in which the stream comes to the collective until it has the result.
They are read after they have passed, by another thread, so that nothing waits for them.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from nbdist.collectives import flight_recorder
from nbdist.collectives.signature import Signature

__all__ = ["GpuTimer", "bus_bytes", "fastest_call", "gpu_timer"]

LARGE_BYTES = 1 << 16
"""Smaller calls have a latency, but no bandwidth."""
WINDOW_S = 5.0
"""Seconds of which `GpuTimer.share` is the share."""
MOST_PENDING = 10_000


def bus_bytes(operation: str, size: int, ranks: int) -> float | None:
    """Bytes that each link carries in a call, as NCCL's tests define them.

    Args:
        operation: The operation's name.
        size: Bytes of the tensor that the call's signature has: of `all_gather` and
            `scatter` a rank's part, of `reduce_scatter` and `gather` likewise.
        ranks: The size of the group.

    Returns:
        None if the operation is no transfer, or the signature has no size.
    """
    factors = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_gather": ranks - 1,
        "reduce_scatter": ranks - 1,
        "gather": ranks - 1,
        "scatter": ranks - 1,
        "broadcast": 1,
        "reduce": 1,
    }
    return size * factors[operation] if operation in factors and ranks > 1 else None


class _Timed(NamedTuple):
    device: int
    begin: torch.cuda.Event
    end: torch.cuda.Event
    size: float
    """Bytes that each link carries; 0.0 for a call that has no bandwidth."""


class GpuTimer:
    """Times calls on the current stream of a GPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[_Timed] = deque(maxlen=MOST_PENDING)
        self._free: defaultdict[int, deque[torch.cuda.Event]] = defaultdict(deque)
        """By device, because an event stays on the device of its first use."""
        self._passed: deque[tuple[float, float]] = deque()
        """When a call was found to have passed, and its seconds."""
        self._fastest = 0.0

    @contextmanager
    def timing(self, kind: Signature, ranks: int) -> Iterator[None]:
        """Time what the block queues. The current device must be the tensor's."""
        if torch.cuda.is_current_stream_capturing():
            yield
            return
        device = torch.cuda.current_device()
        begin, end = self._event(device), self._event(device)
        begin.record()
        yield
        end.record()
        size = 0
        if kind.dtype != "object":
            size = math.prod(kind.shape) * _item_size(kind.dtype)
        transferred = bus_bytes(kind.operation, size, ranks) or 0.0
        large = transferred if size >= LARGE_BYTES else 0.0
        self._pending.append(_Timed(device, begin, end, large))

    def share(self) -> float:
        """The share of the last seconds in which the GPU was in a call, 0.0 to 1.0."""
        with self._lock:
            self._read()
            return min(1.0, sum(seconds for _, seconds in self._passed) / WINDOW_S)

    def fastest(self) -> float:
        """Bytes per second of the fastest large call since the last time; or 0.0."""
        with self._lock:
            self._read()
            found, self._fastest = self._fastest, 0.0
            return found

    def _event(self, device: int) -> torch.cuda.Event:
        try:
            return self._free[device].popleft()
        except IndexError:
            return torch.cuda.Event(enable_timing=True)

    def _read(self) -> None:
        """Take the calls that the GPU has passed."""
        now = time.monotonic()
        try:
            while self._pending and self._pending[0].end.query():
                device, begin, end, size = self._pending.popleft()
                seconds = begin.elapsed_time(end) / 1e3
                self._passed.append((now, seconds))
                if size and seconds > 0:
                    self._fastest = max(self._fastest, size / seconds)
                self._free[device].extend((begin, end))
        except RuntimeError:  # the GPU has failed: the user's next call says so
            self._pending.clear()
        while self._passed and self._passed[0][0] < now - WINDOW_S:
            self._passed.popleft()


gpu_timer = GpuTimer()
"""That of this process."""
_last_ticket = 0


def fastest_call() -> float | None:
    """The bandwidth of the fastest large call since the last time.

    Returns:
        Bytes per second that each link carried; None if there was no large call.
    """
    global _last_ticket
    fastest = gpu_timer.fastest()
    for call in flight_recorder.recent_calls(_last_ticket):
        _last_ticket = max(_last_ticket, call.ticket)
        seconds = (call.ended_ns - call.started_ns) / 1e9
        if call.state != "done" or call.device == "cuda" or call.dtype == "object":
            continue
        size = math.prod(map(int, re.findall(r"\d+", call.shape)))
        size *= _item_size(call.dtype)
        transferred = bus_bytes(call.operation, size, len(call.members))
        if transferred and size >= LARGE_BYTES and seconds > 0:
            fastest = max(fastest, transferred / seconds)
    return fastest or None


def _item_size(dtype: str) -> int:
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize
