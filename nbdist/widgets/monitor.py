"""The live monitor: a chart of the ranks' metrics, and a table of their devices."""

from __future__ import annotations

import sys
import threading
import uuid
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import anywidget
import traitlets
from IPython.core.getipython import get_ipython

from nbdist.ipc.locks import Event
from nbdist.widgets.control_comms import ControlComms
from nbdist.widgets.pacing import Pacer
from nbdist.widgets.slow_rank import slow_rank, splits_of
from nbdist.widgets.source import Cursor, SeriesDelta, Snapshot, Source
from nbdist.wire import DeviceSample, Mark, RankInfo, TimeSplit

__all__ = ["Monitor"]

_STATIC = files("nbdist.widgets") / "static"


class Monitor(anywidget.AnyWidget):
    """Shows a collector's data live, also while a cell keeps the kernel busy.

    A thread sends changes at most ten times a second. Messages are numbered. A front
    end that misses a message requests all data.

    Args:
        source: The data, such as a `telemetry.collector.Collector`.
        metrics: The metrics to show, with a chart for each; empty means the first that
            was logged. One that nobody has logged yet is shown later.
        x: "step" or "time".
        log: Whether the y axis is logarithmic.
        smoothing: The steps, or seconds, over which a value's weight halves; 0 draws
            the values as they are.
    """

    _esm = (_STATIC / "monitor.js").read_text(encoding="utf-8")
    _css = (_STATIC / "monitor.css").read_text(encoding="utf-8")

    metrics = traitlets.List(traitlets.Unicode()).tag(sync=True)
    x = traitlets.Enum(["step", "time"], "step").tag(sync=True)
    log = traitlets.Bool(False).tag(sync=True)
    smoothing = traitlets.Float(0.0, min=0.0).tag(sync=True)
    details = traitlets.Bool(False).tag(sync=True)
    picture = traitlets.Unicode().tag(sync=True)
    """The name of the still picture that the widget hides while it is shown. It is also
    the id of the model, which the front end would not know otherwise."""

    _ended = True  # ipywidgets also closes a widget whose construction has failed

    def __init__(
        self,
        source: Source,
        *,
        metrics: Sequence[str] = (),
        x: str = "step",
        log: bool = False,
        smoothing: float = 0.0,
    ) -> None:
        name = uuid.uuid4().hex
        super().__init__(
            metrics=list(metrics),
            x=x,
            log=log,
            smoothing=smoothing,
            model_id=name,
            picture=name,
        )
        self._source = source
        self._pacer = Pacer()
        self._sequence = 0
        self._cursor: Cursor | None = None
        self._splits: dict[int, TimeSplit] = {}
        self._changed = Event()
        self._hurry = Event()
        self._closers: list[Callable[[], None]] = []
        self.on_msg(self._receive)
        kernel = getattr(get_ipython(), "kernel", None)
        if kernel is not None:
            ControlComms(kernel).install()
        self._unsubscribe = source.subscribe(self._changed.set)
        self._changed.set()
        self._ended = False
        self._thread = threading.Thread(
            target=self._run, name="nbdist-monitor", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Send the last changes, end the thread, close views. Safe to call twice."""
        if not self._ended:
            self._ended = True
            self._unsubscribe()
            self._hurry.set()
            self._changed.set()
            self._thread.join(timeout=1.0)
            for closer in self._closers:
                closer()
        super().close()

    def __repr__(self) -> str:
        return "nbdist monitor"

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once, when the monitor is closed."""
        self._closers.append(callback)

    def _run(self) -> None:
        while not self._ended:
            self._changed.wait()
            self._changed.clear()
            size = self._publish()
            self._hurry.wait(self._pacer.delay_s(size))
            self._hurry.clear()

    def _publish(self) -> int:
        """Send the changes since the last message. Returns their size in bytes."""
        everything = self._pacer.next_is_complete()
        snapshot = self._source.snapshot(None if everything else self._cursor)
        self._cursor = snapshot.cursor
        present = {info.rank for info in snapshot.ranks}
        latest = self._splits | splits_of(snapshot)
        self._splits = {rank: latest[rank] for rank in latest if rank in present}
        content, buffer = _encode(snapshot, self._sequence)
        content["slow"] = slow_rank(self._splits)
        self._sequence += 1
        self.send(content, [buffer])
        self._pacer.sent()
        return len(buffer)

    def _receive(
        self, _: Monitor, content: dict[str, Any], __: list[memoryview]
    ) -> None:
        # May run in any thread: ipykernel 7 receives widgets' messages during a cell.
        self._pacer.acknowledged()
        if content.get("kind") == "everything":
            self._pacer.ask()
            self._changed.set()
            self._hurry.set()


def _encode(snapshot: Snapshot, sequence: int) -> tuple[dict[str, Any], bytes]:
    """A snapshot as a widget message: its content, and one buffer of numbers.

    The buffer holds little-endian float64. For each entry of `series`, in order, it has
    step, time and value of the latest sample, then `count` steps, times, means, lows
    and highs.
    """
    content = {
        "kind": "update",
        "sequence": sequence,
        "full": snapshot.full,
        "series": [_header(delta) for delta in snapshot.deltas],
        "ranks": [_rank(info) for info in snapshot.ranks],
        "devices": [_device(samples) for samples in snapshot.devices.values()],
        "lost": [list(item) for item in snapshot.lost.items()],
        "steps": [list(item) for item in snapshot.steps.items()],
        "eta": None if snapshot.eta is None else asdict(snapshot.eta),
        "marks": None if snapshot.marks is None else list(map(_mark, snapshot.marks)),
    }
    numbers = array("d")
    for delta in snapshot.deltas:
        _append(numbers, delta)
    if sys.byteorder == "big":
        numbers.byteswap()
    return content, numbers.tobytes()


def _header(delta: SeriesDelta) -> list[str | int | bool]:
    length = len(delta.steps)
    return [
        delta.metric, delta.rank, delta.width, delta.start, length, delta.is_internal
    ]  # fmt: skip


def _append(numbers: array[float], delta: SeriesDelta) -> None:
    numbers.extend(delta.latest)
    for column in (delta.steps, delta.times, delta.means, delta.lows, delta.highs):
        numbers.extend(column)


def _rank(info: RankInfo) -> list[str | int]:
    return [info.rank, info.host, info.device, info.device_name]


def _mark(mark: Mark) -> dict[str, Any]:
    return {"time": mark.time, "kind": mark.kind, "text": str(mark)}


def _device(samples: list[DeviceSample]) -> dict[str, Any]:
    last = samples[-1]
    return {
        "rank": last.rank,
        "device": last.device,
        "utilisation": [sample.utilisation for sample in samples],
        "used": last.memory_used,
        "total": last.memory_total,
        "allocated": last.allocated,
        "reserved": last.reserved,
        "temperature": last.temperature,
        "power": last.power,
        "cpu": last.cpu,
        "resident": last.resident,
        "disk": last.disk,
        "network": last.network,
        "bandwidth": last.bus_bandwidth,
        "split": last.split and last.split.shares,
    }
