"""Waiting for workers: what they print meanwhile, and how they have ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbdist.cluster.worker import Report, Worker

__all__ = ["Awaited", "watch"]

SHOW_PERIOD_S = 0.1
"""How often their files are looked at for new text, which raises no event."""


@dataclass(frozen=True)
class Awaited:
    """How the workers fared that were waited for."""

    workers: list[Report]

    @property
    def ok(self) -> bool:
        """Whether none has failed, was stopped, or was lost."""
        return not self.failures

    @property
    def succeeded(self) -> list[Report]:
        return [report for report in self.workers if report.status == "succeeded"]

    @property
    def failures(self) -> list[Report]:
        """Those that ended otherwise; `reason` and `last_lines` say why."""
        ways = ("failed", "stopped", "lost")
        return [report for report in self.workers if report.status in ways]

    @property
    def unfinished(self) -> list[Report]:
        """Those that have not ended."""
        ways = ("starting", "running")
        return [report for report in self.workers if report.status in ways]

    def __str__(self) -> str:
        return "\n".join(str(report) for report in self.workers) or "no workers"

    __repr__ = __str__


def watch(
    workers: Sequence[Worker],
    to_the_end: bool,
    timeout_s: float | None,
    *,
    show: bool,
) -> bool:
    """Wait until every worker has ended, or begun; whether that came in time.

    Args:
        show: Print their lines as they come.
    """

    def done() -> bool:
        return all(
            worker.ended or (not to_the_end and worker.pid is not None)
            for worker in workers
        )

    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left = max(0.0, deadline - time.monotonic())
        come = _wait(workers, done, min(left, SHOW_PERIOD_S) if show else left)
        if show:
            _show(workers)
        if come or left == 0:
            return come


def _wait(workers: Sequence[Worker], done: Callable[[], bool], left_s: float) -> bool:
    """Wait for an event that makes it true; whether it is."""
    for worker in workers:
        if not worker.ended:  # those that have not share the one guard that lives
            return worker.keeper.wait(done, None if math.isinf(left_s) else left_s)
    return done()


def _show(workers: Sequence[Worker]) -> None:
    for worker in workers:
        for line in worker.new_lines():
            print(f"[{worker.role} {worker.id}] {line}", flush=True)
