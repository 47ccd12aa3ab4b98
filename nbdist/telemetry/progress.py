"""How far the ranks are in a training, how fast they are, and how long it takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from nbdist.widgets.source import Eta
from nbdist.wire import StepProgress

__all__ = ["ProgressTracker"]

WINDOW_S = 60.0
"""Seconds over which the rate is measured, or one step if that takes longer."""
SPACING_S = 1.0
"""The least number of seconds between two points that are kept."""
FRESH_S = 3.0
"""A rank that has made no step for so long, nor for `FRESH_STEPS` times the duration of
a step, is not expected to continue at its rate."""
FRESH_STEPS = 3


@dataclass
class _Track:
    """One rank's progress."""

    unit: str
    total: int
    points: deque[tuple[float, int]] = field(default_factory=deque)
    """Times and steps done, of the last minute."""

    @property
    def done(self) -> int:
        return min(self.points[-1][1], self.total)

    @property
    def remaining(self) -> int:
        return self.total - self.done

    def add(self, time: float, done: int) -> None:
        """Add a point. Points from before a return to an earlier step are removed."""
        if self.points and done < self.points[-1][1]:
            self.points.clear()
        if len(self.points) > 1 and time - self.points[-2][0] < SPACING_S:
            self.points.pop()
        self.points.append((time, done))
        while len(self.points) > 2 and self.points[1][0] <= time - WINDOW_S:
            self.points.popleft()

    def step_s(self, now: float) -> float | None:
        """Seconds for a step; None if unknown, or if the rank makes no steps now."""
        (first, from_step), (last, to_step) = self.points[0], self.points[-1]
        if to_step == from_step or last <= first:
            return None
        step_s = (last - first) / (to_step - from_step)
        return step_s if now - last <= max(FRESH_S, FRESH_STEPS * step_s) else None

    def left_s(self, now: float) -> float | None:
        """Seconds until the end; None if unknown."""
        step_s = self.step_s(now)
        if not self.remaining:
            return 0.0
        return None if step_s is None else self.remaining * step_s


class ProgressTracker:
    """Follows the progress of the ranks whose number of steps is known."""

    def __init__(self) -> None:
        self._tracks: dict[int, _Track] = {}

    def update(self, rank: int, progress: StepProgress | None) -> None:
        """Note a rank's progress; None if it is in no loop of known length."""
        if progress is None:
            self._tracks.pop(rank, None)
            return
        track = self._tracks.get(rank)
        if track is None or (track.unit, track.total) != (
            progress.unit,
            progress.total,
        ):
            track = self._tracks[rank] = _Track(progress.unit, progress.total)
        if not track.points or progress.time > track.points[-1][0]:
            track.add(progress.time, progress.done)

    def keep(self, ranks: Collection[int]) -> None:
        """Forget the ranks that have left."""
        self._tracks = {r: t for r, t in self._tracks.items() if r in ranks}

    def eta(self, now: float) -> Eta | None:
        """The progress of the rank that needs longest; None without any progress.

        A rank that has stopped needs longest, because nobody knows how long.

        Args:
            now: Seconds since the epoch.
        """

        def time_needed(track: _Track) -> tuple[bool, float, int]:
            left_s = track.left_s(now)
            return left_s is None, left_s or 0.0, track.remaining

        slowest = max(self._tracks.values(), key=time_needed, default=None)
        if slowest is None:
            return None
        step_s = slowest.step_s(now)
        return Eta(
            unit=slowest.unit,
            done=slowest.done,
            total=slowest.total,
            rate=None if step_s is None else 1 / step_s,
            left_s=slowest.left_s(now),
        )
