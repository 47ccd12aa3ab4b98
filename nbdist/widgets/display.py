"""Displays the monitor in a notebook, with a still picture for saved notebooks."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from nbdist.ipc.locks import Event
from nbdist.widgets.monitor import Monitor
from nbdist.widgets.picture import picture
from nbdist.widgets.slow_rank import slow_rank, splits_of
from nbdist.widgets.source import Cursor, Source
from nbdist.widgets.table import Table

__all__ = ["latest_values", "show"]

UPDATE_S = 30.0
"""Seconds between two updates of the still picture during a cell."""


def show(
    source: Source,
    *,
    metric: str | Sequence[str] = (),
    x: str = "step",
    log: bool = False,
) -> Monitor:
    """Display a live monitor of the collector in the running cell.

    A still picture is displayed with it, which the widget hides. A saved notebook shows
    the picture. It is updated at the end of each cell, each half minute of a long cell,
    and when the user chooses other metrics, until the monitor is closed.

    Args:
        source: The data, such as a `telemetry.collector.Collector`.
        metric: The metric to show, or several, each in a chart. Default: the first that
            was logged.
        x: "step" or "time".
        log: Whether the y axis is logarithmic.
    """
    metrics = [metric] if isinstance(metric, str) else metric
    monitor = Monitor(source, metrics=metrics, x=x, log=log)
    display(monitor)
    still = _Still(source, monitor)
    monitor.on_close(still.close)
    return monitor


def latest_values(source: Source, metrics: Sequence[str] = ()) -> Table:
    """A table of the last value of each metric, or of some, on each rank.

    The progress is given below it, and the rank for which the others wait.
    """
    snapshot = source.snapshot()
    rows = [
        (delta.metric, delta.rank, f"{delta.latest[0]:g}", f"{delta.latest[2]:g}")
        for delta in snapshot.deltas
        if delta.metric in metrics or not (metrics or delta.is_internal)
    ]
    eta = "" if snapshot.eta is None else str(snapshot.eta)
    note = "\n".join(filter(None, (eta, slow_rank(splits_of(snapshot)))))
    if not rows:
        note = "nothing was logged: nbdist.log(loss=loss) in a cell"
    return Table(["metric", "rank", "step", "value"], sorted(rows), note)


class _Still:
    """The picture that a saved notebook shows."""

    def __init__(self, source: Source, monitor: Monitor) -> None:
        self._source = source
        self._monitor = monitor
        self._lock = threading.Lock()
        self._closed = Event()
        self._cursor: Cursor | None = None
        self._choice: tuple[list[str], bool] = ([], False)
        """The metrics of the picture, and whether its axes are logarithmic."""
        self._handle = display(self._bundle(), raw=True, display_id=uuid.uuid4().hex)
        shell = get_ipython()
        self._events = None if shell is None else shell.events
        if self._events is not None:
            self._events.register("post_run_cell", self.update)
        monitor.observe(self.update, ["metrics", "log"])
        threading.Thread(target=self._run, name="nbdist-still", daemon=True).start()

    def update(self, _: object = None) -> None:
        """Draw the picture again if there are new values, or others are chosen."""
        with self._lock:
            news = self._source.snapshot(self._cursor)
            is_old = news.deltas or news.marks or self._choice != self._chosen
            if self._handle and is_old:
                self._handle.update(self._bundle(), raw=True)

    def close(self) -> None:
        """Draw the picture for the last time."""
        self._closed.set()
        self._monitor.unobserve(self.update, ["metrics", "log"])
        self.update()
        if self._events is not None:
            self._events.unregister("post_run_cell", self.update)

    def _run(self) -> None:
        while not self._closed.wait(UPDATE_S):
            self.update()

    @property
    def _chosen(self) -> tuple[list[str], bool]:
        return list(self._monitor.metrics), self._monitor.log

    def _bundle(self) -> dict[str, Any]:
        snapshot = self._source.snapshot()
        self._cursor = snapshot.cursor
        self._choice = metrics, log = self._chosen
        name = f"nbdist-static-{self._monitor.picture}"
        html = picture(snapshot, metrics, log=log, name=name)
        return {"text/html": html, "text/plain": repr(latest_values(self._source))}
