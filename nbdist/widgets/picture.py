"""A still picture of some metrics, as HTML that any notebook viewer shows.

Viewers that do not trust a notebook remove inline SVG. Each chart is therefore an image
whose SVG is in a data URL, and the table is plain HTML.
"""

from __future__ import annotations

import base64
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from statistics import median

from nbdist.widgets.slow_rank import slow_rank, splits_of
from nbdist.widgets.source import SeriesDelta, Snapshot
from nbdist.wire import SHARES, Mark, MarkKind

__all__ = ["picture"]

Points = list[tuple[float, float]]
Placed = list[tuple[float, Mark]]
"""Marks, each with its step."""

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 28, 36
MOST_LINES = 12
MOST_POINTS = 400
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000",
           "#F0E442"]  # fmt: skip  # Okabe and Ito, 2008; the live chart has the same
MARK_COLOURS: dict[MarkKind, str] = {
    "commit": "#999", "replaced": "#009E73", "resized": "#009E73",
    "restarted": "#009E73", "interrupted": "#E69F00", "nan": "#CC79A7",
    "lost": "#D55E00",
}  # fmt: skip
"""In the order of painting, in which what has followed a death comes before it."""


def picture(
    snapshot: Snapshot, metrics: Sequence[str], *, log: bool = False, name: str = ""
) -> str:
    """A chart of each of the metrics over the steps and their table, as HTML.

    The marks are lines in the charts. Those of commits are dotted, and the others are
    listed below the table.

    Args:
        snapshot: A full snapshot.
        metrics: The metrics to show. If the snapshot has none of them, the first that
            was logged.
        log: Whether the y axis is logarithmic. Values of 0 or less are then left out.
        name: The CSS class of the outermost element.
    """
    of: dict[str, list[SeriesDelta]] = {}
    for delta in sorted(snapshot.deltas, key=lambda delta: delta.rank):
        of.setdefault(delta.metric, []).append(delta)
    shown = [metric for metric in metrics if metric in of] or default_metrics(snapshot)
    if not shown:
        return f'<div class="{escape(name)}">Nothing was logged.</div>'
    placed = {m: _placed(snapshot.marks or [], of[m]) for m in shown}
    charts = "".join(_chart(m, of[m], placed[m], log) for m in shown)
    table = _table({metric: of[metric] for metric in shown}, snapshot)
    return (
        f'<div class="{escape(name)}">{charts}{table}{_events(placed[shown[0]])}'
        f"<div>{escape(slow_rank(splits_of(snapshot)))}</div></div>"
    )


def default_metrics(snapshot: Snapshot) -> list[str]:
    """The metric to show if none is chosen; empty if none was logged.

    It is rather one that the user has logged than one of nbdist's.
    """
    logged = (each for each in snapshot.deltas if not each.metric.startswith(SHARES))
    first = min(logged, key=lambda delta: delta.is_internal, default=None)
    return [] if first is None else [first.metric]


def _chart(metric: str, deltas: list[SeriesDelta], placed: Placed, log: bool) -> str:
    source = base64.b64encode(_svg(metric, deltas, placed, log).encode()).decode()
    return (
        f'<div><img alt="{escape(_summary(metric, deltas))}" width="{WIDTH}" '
        f'height="{HEIGHT}" src="data:image/svg+xml;base64,{source}"></div>'
    )


def _summary(metric: str, deltas: list[SeriesDelta]) -> str:
    values = [delta.latest[2] for delta in deltas]
    step = max(delta.latest[0] for delta in deltas)
    return (
        f"{metric} of {len(deltas)} ranks by step: from {min(values):.4g} to "
        f"{max(values):.4g} at step {step:.0f}"
    )


def _table(shown: dict[str, list[SeriesDelta]], snapshot: Snapshot) -> str:
    """The latest step and the latest value of each metric, for each rank."""
    where = {info.rank: f"{info.host}:{info.device}" for info in snapshot.ranks}
    latest = {
        metric: {delta.rank: delta.latest for delta in deltas}
        for metric, deltas in shown.items()
    }
    rows = []
    for rank in sorted({rank for each in latest.values() for rank in each}):
        found = [each.get(rank) for each in latest.values()]
        step = next(sample[0] for sample in found if sample is not None)
        values = ["" if sample is None else f"{sample[2]:.4g}" for sample in found]
        cells = [str(rank), where.get(rank, ""), f"{step:.0f}", *values]
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    head = ["rank", "device", "step", *shown]
    return (
        f"<table><thead><tr>{''.join(f'<th>{escape(each)}</th>' for each in head)}"
        "</tr></thead><tbody>"
        f"{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"
    )


def _placed(marks: Iterable[Mark], deltas: list[SeriesDelta]) -> Placed:
    """The marks since the first value, each at the step that was logged last."""
    placed = []
    for mark in marks:
        before = [
            (delta.times[i - 1], delta.steps[i - 1])
            for delta in deltas
            if (i := bisect_right(delta.times, mark.time))
        ]
        if before:
            placed.append((max(before)[1], mark))
    return placed


def _events(placed: Placed) -> str:
    rows = "".join(
        f"<li>step {step:.0f}: {escape(str(mark))}</li>"
        for step, mark in placed
        if mark.kind != "commit"
    )
    return f"<ul>{rows}</ul>" if rows else ""


def _mark_lines(axes: _Axes, placed: Placed) -> Iterator[str]:
    """A line for each kind of mark at a step. Dashes show the line below."""
    order = list(MARK_COLOURS)
    solid: set[float] = set()
    kinds = {(order.index(mark.kind), step) for step, mark in placed}
    for number, step in sorted(kinds):
        kind = order[number]
        style = f'stroke="{MARK_COLOURS[kind]}"'
        if kind == "commit":
            style += ' stroke-dasharray="1 3"'
        elif step in solid:
            style += ' stroke-dasharray="6 6"'
        else:
            solid.add(step)
        yield axes.upright(step, style)


def _svg(metric: str, deltas: list[SeriesDelta], placed: Placed, log: bool) -> str:
    curves = [_points(delta, log) for delta in deltas]
    steps = [step for delta in deltas for step in delta.steps]
    axes = _Axes(steps, [y for curve in curves for _, y in curve], log)
    if len(deltas) > MOST_LINES:
        shapes = _band(deltas, axes, log)
    else:
        shapes = [
            _polyline(axes, _thin(curve), COLOURS[delta.rank % len(COLOURS)])
            for delta, curve in zip(deltas, curves, strict=True)
        ]
    shapes += _mark_lines(axes, placed)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11" fill="#333">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff"/>'
        f'<text x="{LEFT}" y="18" font-weight="bold">{escape(metric)}</text>'
        f'<text x="{WIDTH - RIGHT}" y="18" text-anchor="end">{len(deltas)} ranks, '
        f"by step</text>{axes.grid()}{''.join(shapes)}</svg>"
    )


def _points(delta: SeriesDelta, log: bool) -> Points:
    """The points that can be drawn: finite, and positive on a logarithmic axis."""
    return [
        (x, math.log10(y) if log else y)
        for x, y in zip(delta.steps, delta.means, strict=True)
        if math.isfinite(y) and (y > 0 or not log)
    ]


def _thin(points: Points) -> Points:
    """At most MOST_POINTS points: the least and the greatest of each chunk."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / MOST_POINTS)
    thinned = []
    for start in range(0, len(points), size):
        chunk = sorted(points[start : start + size], key=lambda point: point[1])
        thinned += sorted((chunk[0], chunk[-1]))
    return thinned


def _band(deltas: list[SeriesDelta], axes: _Axes, log: bool) -> list[str]:
    """The median over the ranks as a line, and their range as a band."""
    at: dict[float, list[float]] = {}
    for delta in deltas:
        for x, y in _points(delta, log):
            at.setdefault(x, []).append(y)
    steps = sorted(at)
    steps = steps[:: math.ceil(len(steps) / MOST_POINTS)] if steps else []
    low = [(x, min(at[x])) for x in steps]
    high = [(x, max(at[x])) for x in reversed(steps)]
    outline = axes.path(low + high)
    return [
        f'<polygon points="{outline}" fill="{COLOURS[0]}" fill-opacity="0.2"/>',
        _polyline(axes, [(x, median(at[x])) for x in steps], COLOURS[0]),
    ]


def _polyline(axes: _Axes, points: Points, colour: str) -> str:
    return (
        f'<polyline points="{axes.path(points)}" fill="none" stroke="{colour}" '
        'stroke-width="1.5"/>'
    )


class _Axes:
    """Maps steps and values (or their logarithms) to the picture."""

    def __init__(
        self, steps: Sequence[float], values: Sequence[float], log: bool
    ) -> None:
        self._log = log
        self._x = _span(steps)
        self._y = _span(values)

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{self._left(x):.1f},{self._top(y):.1f}" for x, y in points)

    def grid(self) -> str:
        horizontal = "".join(self._horizontal(y) for y in _ticks(*self._y, 5))
        return horizontal + "".join(self._vertical(x) for x in _ticks(*self._x, 8))

    def upright(self, x: float, attributes: str) -> str:
        """A line over the whole height."""
        return f'<path d="M{self._left(x):.1f} {TOP}V{HEIGHT - BOTTOM}" {attributes}/>'

    def _horizontal(self, y: float) -> str:
        top = self._top(y)
        return (
            f'<path d="M{LEFT} {top:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{top + 4:.1f}" text-anchor="end">'
            f"{10**y if self._log else y:.4g}</text>"
        )

    def _vertical(self, x: float) -> str:
        left = self._left(x)
        return self.upright(x, 'stroke="#ddd"') + (
            f'<text x="{left:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{x:.6g}</text>"
        )

    def _left(self, x: float) -> float:
        low, high = self._x
        return LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def _top(self, y: float) -> float:
        low, high = self._y
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers within the span, spaced by 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(m * power for m in (1, 2, 5, 10) if (high - low) / (m * power) <= most)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [i * step for i in range(first, last + 1)]
