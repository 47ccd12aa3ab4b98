"""The monitor in a terminal: a table of the ranks with sparklines.

`rich` draws it. The table is above the last line of the terminal while a cell runs.
"""

from __future__ import annotations

import io
import math
import time
from array import array
from collections import deque
from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from nbdist.widgets.picture import default_metrics
from nbdist.widgets.slow_rank import slow_rank
from nbdist.widgets.source import Cursor, Eta, SeriesDelta, Source
from nbdist.widgets.table import bytes_text
from nbdist.wire import ACTIVITIES, DeviceSample, RankInfo, TimeSplit

__all__ = ["TerminalMonitor"]

SPARKS = "▁▂▃▄▅▆▇█"
LOADS, BAR = 8, 8
"""Characters of the utilisation's history, and of the bar of the time."""
FEWEST_VALUES, MOST_VALUES = 6, 24
"""Characters of a metric's history."""
ACTIVITY_STYLES = ("blue", "bright_black", "red", "magenta")
ACTIVITY_NAMES = ("compute", "comm", "data", "other")
SPEED_S = 60.0
EVERY_S = 0.5
"""The least number of seconds between two drawings."""
RESERVED_LINES = 6
"""Of a terminal's height: the cell's last lines, and those above and below the rows."""
WIDE, NARROW = 100, 90
"""Columns of a terminal from which on GPUs have their temperature and power, and below
which there is no memory."""


class TerminalMonitor:
    """Draws a source's data as text.

    Args:
        source: The data, such as a `telemetry.collector.Collector`.
        metrics: The metrics to show. Default: the first that was logged.
    """

    def __init__(self, source: Source, metrics: Sequence[str] = ()) -> None:
        self._source = source
        self._metrics = list(metrics)
        self._cursor: Cursor | None = None
        self._means: dict[tuple[str, int], array[float]] = {}
        self._latest: dict[tuple[str, int], float] = {}
        self._ranks: dict[int, RankInfo] = {}
        self._devices: dict[int, list[DeviceSample]] = {}
        self._splits: dict[int, TimeSplit] = {}
        self._steps: dict[int, int] = {}
        self._eta: Eta | None = None
        self._speed: deque[tuple[float, int]] = deque()
        self._drawn: tuple[int, int, str] | None = None
        """The size of the terminal, and the text."""
        self._due = 0.0

    def text(self, width: int, height: int) -> str:
        """The data now, as lines with the codes of a terminal.

        Args:
            width, height: The terminal's columns and lines. Of more ranks than fit,
                those are shown that communicate least.
        """
        now, size = time.monotonic(), (width, height)
        if self._drawn is None or self._drawn[:2] != size or now >= self._due:
            self._due = now + EVERY_S
            self._drawn = (*size, self._draw(width, height))
        return self._drawn[2]

    def _draw(self, width: int, height: int) -> str:
        self._take()
        file = io.StringIO()
        console = Console(file=file, width=width, force_terminal=True)
        parts: list[Text | Table] = [Text(self._headline())]
        parts.append(self._table(width, height - RESERVED_LINES))
        if not self._metrics:
            parts.append(Text("nothing was logged: nbdist.log(loss=loss) in a cell"))
        sentence = slow_rank(self._splits)
        if sentence:
            parts.append(Text(sentence, style="bold"))
        console.print(Group(*parts))
        return file.getvalue().rstrip("\n")

    def _take(self) -> None:
        """Read what has changed."""
        snapshot = self._source.snapshot(self._cursor)
        self._cursor = snapshot.cursor
        if snapshot.full:
            self._means.clear()
            self._latest.clear()
        if not self._metrics:
            self._metrics = default_metrics(snapshot)
        for delta in snapshot.deltas:
            if delta.metric in self._metrics:
                self._extend(delta)
        self._ranks = {info.rank: info for info in snapshot.ranks}
        self._devices |= snapshot.devices
        self._devices = {r: d for r, d in self._devices.items() if r in self._ranks}
        splits = {rank: samples[-1].split for rank, samples in self._devices.items()}
        self._splits = {rank: split for rank, split in splits.items() if split}
        self._steps, self._eta = snapshot.steps, snapshot.eta

    def _extend(self, delta: SeriesDelta) -> None:
        key = delta.metric, delta.rank
        means = self._means.setdefault(key, array("d"))
        del means[delta.start :]
        means.extend(delta.means)
        self._latest[key] = delta.latest[2]

    def _headline(self) -> str:
        count = len(self._ranks)
        parts = [f"{count} rank{'s' * (count != 1)}"]
        if self._eta is not None:
            parts.append(str(self._eta))
        elif self._steps:
            step = max(self._steps.values())
            parts.append(f"step {step:,}")
            speed = self._steps_per_second(step)
            if speed:
                parts.append(f"{speed:.3g} steps/s")
        return " · ".join(parts)

    def _steps_per_second(self, step: int) -> float | None:
        now = time.monotonic()
        if self._speed and step < self._speed[-1][1]:
            self._speed.clear()
        self._speed.append((now, step))
        while self._speed[0][0] < now - SPEED_S:
            self._speed.popleft()
        begun, first = self._speed[0]
        return (step - first) / (now - begun) if now > begun else None

    def _table(self, width: int, most: int) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        has_memory = width >= NARROW
        has_gpu = width >= WIDE and any(
            each[-1].device != "cpu" for each in self._devices.values()
        )
        table.add_column("rank", no_wrap=True)
        for title in ("device", "utilisation", "time"):
            table.add_column(title, no_wrap=True)
        right = ["memory"] * has_memory + ["GPU"] * has_gpu + ["step", "behind"]
        for title in right:
            table.add_column(title, justify="right", no_wrap=True)
        for metric in self._metrics:
            table.add_column(metric, no_wrap=True)
        others = 67 + 11 * has_memory + 15 * has_gpu
        room = (width - others) // max(1, len(self._metrics)) - 9
        length = max(FEWEST_VALUES, min(room, MOST_VALUES))
        ranks = self._chosen(max(1, most))
        for rank in ranks:
            table.add_row(*self._row(rank, has_memory, has_gpu, length))
        if len(ranks) < len(self._ranks):
            table.add_row("…", f"{len(self._ranks) - len(ranks)} more")
        return table

    def _chosen(self, most: int) -> list[int]:
        """The ranks that are shown."""
        ranks = sorted(self._ranks)
        if len(ranks) <= most:
            return ranks

        def communicates(rank: int) -> float:
            split = self._splits.get(rank)
            return math.inf if split is None else split.communication

        return sorted(sorted(ranks, key=communicates)[: most - 1])

    def _row(
        self, rank: int, has_memory: bool, has_gpu: bool, length: int
    ) -> list[str | Text]:
        info, samples = self._ranks[rank], self._devices.get(rank, [])
        last = samples[-1] if samples else None
        several = len({each.host for each in self._ranks.values()}) > 1
        cells: list[str | Text] = [str(rank)]
        cells.append(f"{info.host}:{info.device}" if several else info.device)
        loads = [each.utilisation for each in samples if each.utilisation is not None]
        load = f" {loads[-1]:3.0f}%" if loads else "-"
        cells.append(sparkline(loads[-LOADS:], top=100) + load)
        cells.append(time_bar(self._splits.get(rank)))
        if has_memory:
            cells.append(_memory(last))
        if has_gpu:
            cells.append(_card(last))
        step = self._steps.get(rank)
        cells.append("-" if step is None else f"{step:,}")
        behind = None if step is None else max(self._steps.values()) - step
        cells.append("-" if behind is None else f"{behind:,}")
        for metric in self._metrics:
            key = metric, rank
            value = f" {self._latest[key]:.4g}" if key in self._latest else "-"
            means = _thinned(self._means.get(key, ()), length)
            cells.append(sparkline(means) + value)
        return cells


def sparkline(values: Sequence[float], top: float | None = None) -> str:
    """Values as a line of small bars.

    Args:
        top: The value of the highest bar, and 0 that of the lowest. Default: the
            greatest and the least of the values.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = (min(finite), max(finite)) if top is None else (0.0, max(top, *finite))
    span = high - low or 1.0

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return "!"
        return SPARKS[round((value - low) / span * (len(SPARKS) - 1))]

    return "".join(map(bar, values))


def time_bar(split: TimeSplit | None) -> Text:
    """The shares of a rank's time as a bar of colours, with its greatest in words."""
    bar = Text()
    if split is None:
        return bar
    ends = [round(BAR * sum(split.shares[: i + 1])) for i in range(len(ACTIVITIES))]
    for style, begin, end in zip(ACTIVITY_STYLES, [0, *ends], ends, strict=False):
        bar.append("█" * (end - begin), style)
    share, name = max(zip(split.shares, ACTIVITY_NAMES, strict=True))
    return bar.append(f" {name} {share:.0%}")


def _thinned(values: Sequence[float], most: int) -> Sequence[float]:
    """At most so many of the values, evenly spaced, with the last one."""
    step = math.ceil(len(values) / most) or 1
    return values[::-1][::step][::-1]


def _memory(sample: DeviceSample | None) -> str:
    """The memory in use and the total, such as "40/80 GiB"."""
    if sample is None or sample.memory_used is None:
        return "-"
    if sample.memory_total is None:
        return bytes_text(sample.memory_used)
    used, total = sample.memory_used / 2**30, sample.memory_total / 2**30
    return f"{used:.{0 if used >= 10 else 1}f}/{total:.0f} GiB"


def _card(sample: DeviceSample | None) -> str:
    """The temperature and power of a GPU."""
    if sample is None:
        return "-"
    parts = []
    if sample.temperature is not None:
        parts.append(f"{sample.temperature:.0f} °C")
    if sample.power is not None:
        parts.append(f"{sample.power:.0f} W")
    return " ".join(parts) or "-"
