"""Put a monitor into the notebook, with a still picture for when its kernel is gone."""

from __future__ import annotations

import uuid
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from nbdist.widgets.monitor import Monitor
from nbdist.widgets.picture import picture
from nbdist.widgets.source import Cursor, Source

__all__ = ["show"]


def show(
    source: Source, *, metric: str = "", x: str = "step", log: bool = False
) -> Monitor:
    """Display a live monitor of the collector in the running cell.

    The widget hides a still picture beside it, which is kept up to date at the end of
    each cell: a saved notebook shows that one. Closing the monitor ends both.

    Args:
        source: Where the data come from: a `telemetry.collector.Collector`.
        metric: The metric to show first; the first one logged when empty.
        x: "step" or "time".
        log: Whether the y axis is logarithmic.
    """
    monitor = Monitor(source, metric=metric, x=x, log=log)
    display(monitor)
    still = _Still(source, monitor)
    monitor.on_close(still.close)
    return monitor


class _Still:
    """The picture that stays in the saved notebook."""

    def __init__(self, source: Source, monitor: Monitor) -> None:
        self._source = source
        self._monitor = monitor
        self._cursor: Cursor | None = None
        self._handle = display(self._bundle(), raw=True, display_id=uuid.uuid4().hex)
        shell = get_ipython()
        self._events = None if shell is None else shell.events
        if self._events is not None:
            self._events.register("post_run_cell", self.update)

    def update(self, _: object = None) -> None:
        """Draw anew, if anything was logged since."""
        if self._handle and self._source.snapshot(self._cursor).pieces:
            self._handle.update(self._bundle(), raw=True)

    def close(self) -> None:
        """Draw the last state, and stop following."""
        self.update()
        if self._events is not None:
            self._events.unregister("post_run_cell", self.update)

    def _bundle(self) -> dict[str, Any]:
        snapshot = self._source.snapshot()
        self._cursor = snapshot.cursor
        monitor = self._monitor
        html = picture(
            snapshot,
            monitor.metric,
            log=monitor.log,
            name=f"nbdist-static-{monitor.picture}",
        )
        return {"text/html": html, "text/plain": "nbdist monitor"}
