"""Everything that is kept for later has a bound, and keeps the newest."""

from __future__ import annotations

import functools
import re
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbdist.clusters.kept import peer as kept_peer
from nbdist.clusters.kept import server as kept_server
from nbdist.clusters.kept.peer import Peer
from nbdist.clusters.kept.server import Silent
from nbdist.collectives import call_timing, handle
from nbdist.collectives.call_timing import GpuTimer
from nbdist.collectives.compression import BFloat16
from nbdist.collectives.handle import Handle
from nbdist.collectives.sync import cuda_peers
from nbdist.collectives.torch_backend import native_calls
from nbdist.collectives.torch_backend.native_calls import NativeCalls
from nbdist.collectives.transports import compressed_sum, native, slots
from nbdist.collectives.transports.compressed_sum import CompressedSum
from nbdist.collectives.transports.native import CompiledReductions
from nbdist.collectives.transports.slots import Slots, slots_bytes
from nbdist.session import MOST_ENDED_CELLS, BackgroundCell, Session
from nbdist.telemetry import collector as collector_module
from nbdist.telemetry.collector import Collector
from nbdist.telemetry.recorder import Recorder
from nbdist.telemetry.time_split import LOOKS, RunningCode, TimeSplitter
from nbdist.widgets import cell_view
from nbdist.widgets.cell_view import CellView
from nbdist.widgets.lines import Item
from nbdist.widgets.long_text import SHOWN_LINES, LongText
from nbdist.wire import Batch, DeviceSample, Mark

PACKAGE = Path(__file__).parents[1] / "nbdist"
EXTRA = 3
Kept = list[int]
"""The numbers of the things that are kept, of those from 0 on that were added."""


def device_samples(count: int) -> Kept:
    made = Collector()
    for number in range(count):
        sample = DeviceSample(0, float(number), "cpu", None, None, None, 0.0, 0)
        made.receive(Batch(0, "a", number, 0, (sample,)))
    return [int(each.time) for each in made.snapshot().devices[0]]


def marks(count: int) -> Kept:
    made = Collector()
    records = tuple(Mark(float(n), "commit", str(n)) for n in range(count))
    made.receive(Batch(0, "a", 0, 0, records))
    return [int(each.text) for each in made.marks]


def records(count: int) -> Kept:
    made = Recorder(0, lambda _: None, capacity=7)
    made.close()
    for number in range(count):
        made.record(Mark(0.0, "commit", str(number)))
    return [int(each.text) for each in made._buffer if isinstance(each, Mark)]


def looks(count: int) -> Kept:
    numbers = iter(range(count))
    splitter = TimeSplitter(
        lambda: RunningCode("key", [sys._getframe()]),
        lambda *_: "",
        {},
        blocked_in=lambda: str(next(numbers)),
        waits_in_backward=bool,
        device_share=float,
        end="/nowhere",
    )
    for _ in range(count):
        assert splitter.look()
    return [int(each.kind) for each in splitter._looks]


def failed_calls(count: int) -> Kept:
    handle.unseen_errors()
    for number in range(count):
        Handle(str(number)).complete(ValueError())
    return [int(each.call) for each in handle.unseen_errors()]


def native_details(count: int) -> Kept:
    made = NativeCalls()
    for number in range(count):
        made.note(number, "broadcast", None, [number])
    return list(made.details)


def memory_handles(count: int) -> Kept:
    given = cuda_peers._given
    before = list(given)
    given.extend((number, ()) for number in range(count))  # type: ignore[misc]
    found = [number for number, _ in given]
    given.clear()
    given.extend(before)
    return found


def timed_calls(count: int) -> Kept:
    timer: Any = GpuTimer()
    timer._pending.extend(range(count))
    return list(timer._pending)


def errors_of_tensors(count: int) -> Kept:
    comm: Any = SimpleNamespace(size=1, rank=0)
    made = CompressedSum(comm, BFloat16(), lambda: None)
    tensors = [torch.zeros(1) for _ in range(count)]
    for tensor in tensors:
        made._errors_of(tensor, tensor, tensor)
    addresses = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [addresses.index(address) for address, *_ in made._residuals]


def lines_of_a_long_text(count: int) -> Kept:
    text = LongText("name", None)
    for number in range(count):
        text.add([0], [str(number)])
    return [int(line) for line in text._last[0]]


def ended_cells(count: int) -> Kept:
    session = Session()
    for number in range(count):
        future: Any = Future()
        future.set_result(None)
        session._remember(BackgroundCell(number, "0", "", future))
    return list(session._in_background)


BOUNDS: dict[str, tuple[Callable[[int], Kept], int]] = {
    "device samples of a rank": (device_samples, collector_module.DEVICE_HISTORY),
    "marks of a kind": (marks, collector_module.MARKS_OF_A_KIND),
    "records": (records, 7),
    "looks": (looks, LOOKS),
    "failed calls": (failed_calls, 100),
    "native calls": (native_details, native_calls._KEPT),
    "memory handles": (memory_handles, 10_000),
    "timed calls": (timed_calls, call_timing.MOST_PENDING),
    "errors of tensors": (errors_of_tensors, compressed_sum.MOST_TENSORS),
    "lines of a long text": (lines_of_a_long_text, SHOWN_LINES),
    "ended cells": (ended_cells, MOST_ENDED_CELLS),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_the_newest_are_kept(name: str) -> None:
    fill, bound = BOUNDS[name]
    assert fill(bound + EXTRA) == list(range(EXTRA, bound + EXTRA))
    assert fill(bound) == list(range(bound))


def test_every_deque_with_a_bound_is_filled() -> None:
    found = [
        path.stem
        for path in PACKAGE.rglob("*.py")
        for _ in re.findall(r"maxlen=", path.read_text(encoding="utf-8"))
    ]
    assert sorted(found) == [
        "call_timing", "collector", "collector", "cuda_peers", "handle", "long_text",
        "native_calls", "recorder", "time_split",
    ]  # fmt: skip


def slot_views(count: int) -> Iterator[int]:
    made = Slots(torch.zeros(slots_bytes(1, 4096), dtype=torch.uint8), 0, 1)
    for length in range(count):
        made.views(torch.uint8, length)
        made.piece_views(torch.uint8, length)
        yield max(len(made._slot_views), len(made._piece_views))


def reductions(count: int) -> Iterator[int]:
    module: Any = SimpleNamespace(KERNELS=(), ALL_REDUCE=0, REDUCE=1, REDUCE_SCATTER=2)
    made = CompiledReductions(module, None, 0)
    for length in range(count):
        assert made.plan("reduce", "sum", torch.float32, length) is None
        yield len(made.plans)


@pytest.mark.parametrize(
    ("fill", "bound"), [(slot_views, slots._CACHED_VIEWS), (reductions, native._PLANS)]
)
def test_a_cache_begins_anew_at_its_bound(
    fill: Callable[[int], Iterator[int]], bound: int
) -> None:
    sizes = list(fill(bound + EXTRA))
    assert sizes == [*range(1, bound + 1), *range(1, EXTRA + 1)]


def pipe() -> tuple[Connection, socket.socket]:
    end, other = socket.socketpair()
    return Connection(end.detach()), other


def test_of_many_silent_connections_the_oldest_end() -> None:
    silent, pipes = Silent(), [pipe() for _ in range(kept_server.MOST_SILENT + EXTRA)]
    for connection, _ in pipes:
        silent.add(connection)
    others = [other for _, other in pipes]
    for other in others:
        other.setblocking(False)
    assert [other.recv(1) for other in others[:EXTRA]] == [b""] * EXTRA
    for other in others[EXTRA:]:
        with pytest.raises(BlockingIOError):
            other.recv(1)
    for connection, other in pipes:
        connection.close()
        other.close()


def test_a_notebook_that_is_too_far_behind_is_disconnected() -> None:
    connection, other = pipe()
    peer = Peer(connection, lambda *_: None, lambda _: None)  # nothing is sent
    for number in range(kept_peer.MOST_WAITING):
        peer.send(number)
    assert peer.is_open
    peer.send("one more")
    assert not peer.is_open
    assert len(peer._waiting) == kept_peer.MOST_WAITING
    assert other.recv(1) == b""
    connection.close()
    other.close()


@pytest.mark.parametrize(
    ("bound", "line"),
    [(cell_view.MOST_KEPT_ITEMS, "x"), (5, "x" * (cell_view.MOST_KEPT_BYTES // 5))],
)
def test_a_view_keeps_its_order_beyond_so_much_output(bound: int, line: str) -> None:
    view = CellView([0], "key")
    view._kept = {}
    keep = functools.partial(view._keep, 0, Item("stdout", [line]))
    for _ in range(bound):
        keep()
    assert view._kept is not None
    keep()
    assert view._kept is None
