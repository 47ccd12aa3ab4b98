"""Counts how long the steps of a training loop wait for data."""

from __future__ import annotations

import time
from dataclasses import dataclass

from nbdist.telemetry import internal_metrics

__all__ = ["Waits"]


@dataclass
class Waits:
    """Counts the steps of a loop over batches, and their time.

    At the end of each step two metrics are logged: `data_wait_s`, the seconds that the
    step waited for its batch, and `step_s`, the seconds of the whole step.
    """

    steps: int = 0
    waited_s: float = 0.0
    """Seconds that all steps waited for data."""
    total_s: float = 0.0
    """Seconds that all steps took, waiting included."""
    _begun: float | None = None
    _waited: float = 0.0

    @property
    def share(self) -> float:
        """The fraction of the steps' time that was spent waiting: 0.0 to 1.0."""
        return self.waited_s / self.total_s if self.total_s else 0.0

    def begin(self) -> None:
        """End the previous step, and begin one whose batch is requested now."""
        now = time.perf_counter()
        if self._begun is not None:
            took = now - self._begun
            self.steps += 1
            self.waited_s += self._waited
            self.total_s += took
            internal_metrics.record(data_wait_s=self._waited, step_s=took)
        self._begun = now

    def arrive(self) -> None:
        """Note that the step's batch has arrived."""
        assert self._begun is not None
        self._waited = time.perf_counter() - self._begun

    def leave(self) -> None:
        """Note that the loop has ended. The time that follows is not counted."""
        self._begun = None

    def clear(self) -> None:
        """Set all counts to zero."""
        self.steps, self.waited_s, self.total_s = 0, 0.0, 0.0

    def __str__(self) -> str:
        return (
            f"{self.steps} steps in {self.total_s:.2f} s, of which "
            f"{self.waited_s:.2f} s ({self.share:.0%}) waiting for data"
        )
