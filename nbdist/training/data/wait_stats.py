"""How long the steps of a training loop wait for their data."""

from __future__ import annotations

import time
from dataclasses import dataclass

from nbdist.telemetry import internal_metrics

__all__ = ["Waits"]


@dataclass
class Waits:
    """Counts the steps of a loop over batches, and the time that they take.

    Each is recorded for the monitor too, when the next one begins: `data_wait_s`, the
    seconds that the step waited for its batch, and `step_s`, all that it took.
    """

    steps: int = 0
    waited_s: float = 0.0
    """Seconds that the steps waited for data, altogether."""
    total_s: float = 0.0
    """Seconds that they took, altogether."""
    _begun: float | None = None
    _waited: float = 0.0

    @property
    def share(self) -> float:
        """How much of the time went into waiting: 0.0 to 1.0."""
        return self.waited_s / self.total_s if self.total_s else 0.0

    def begin(self) -> None:
        """A batch is asked for: the step before has ended, and one begins."""
        now = time.perf_counter()
        if self._begun is not None:
            took = now - self._begun
            self.steps += 1
            self.waited_s += self._waited
            self.total_s += took
            internal_metrics.record(data_wait_s=self._waited, step_s=took)
        self._begun = now

    def arrive(self) -> None:
        """The batch is there."""
        assert self._begun is not None
        self._waited = time.perf_counter() - self._begun

    def leave(self) -> None:
        """The loop has ended: what follows is no step."""
        self._begun = None

    def clear(self) -> None:
        """Count from nothing again."""
        self.steps, self.waited_s, self.total_s = 0, 0.0, 0.0

    def __str__(self) -> str:
        return (
            f"{self.steps} steps in {self.total_s:.2f} s, of which "
            f"{self.waited_s:.2f} s ({self.share:.0%}) waiting for data"
        )
