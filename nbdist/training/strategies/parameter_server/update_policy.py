"""Update policies decide what a server does with each gradient.

A policy only counts; it touches no tensor and sends no message. `push` and `leave`
return a `Decision`, which the server carries out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["AsyncUpdates", "Decision", "Report", "SyncUpdates", "UpdatePolicy"]


@dataclass
class Report:
    """The counts of one server."""

    updates: int = 0
    """Number of updates of the parameters."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of gradients by staleness. The staleness of a gradient is the number of
    updates between the pull of its parameters and its arrival."""
    dropped: int = 0
    """Number of gradients that arrived too late to be used."""
    lead: int = 0
    """The most steps that a worker was ahead of the slowest worker when the server sent
    it parameters."""


@dataclass(frozen=True)
class Decision:
    """The next actions of the server."""

    apply: tuple[int, ...] = ()
    """Workers whose gradients the server averages and applies, in this order; empty for
    no update."""
    answer: tuple[int, ...] = ()
    """Workers to which the server sends the parameters after the update."""


class UpdatePolicy(ABC):
    """Decides what one server does with each gradient, and counts.

    Args:
        report: counts of earlier runs, to which this run is added.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self.active: set[int] = set()
        """Workers that may still send gradients."""

    @property
    def version(self) -> int:
        """The version of the parameters: the number of updates so far."""
        return self.report.updates

    def begin(self, workers: Iterable[int]) -> None:
        """Start with these workers."""
        self.active = set(workers)

    def push(self, worker: int, computed_with: int) -> Decision:
        """Decide what to do with a gradient.

        Args:
            worker: the worker that sent the gradient.
            computed_with: version of the parameters that the gradient was computed
                with.
        """
        self.report.staleness[self.version - computed_with] += 1
        return self._push(worker, computed_with)

    @abstractmethod
    def _push(self, worker: int, computed_with: int) -> Decision: ...

    @abstractmethod
    def leave(self, worker: int) -> Decision:
        """Decide what to do when a worker has finished, failed or died.

        Gradients that the worker has pushed before still count.
        """


class SyncUpdates(UpdatePolicy):
    """Averages the first R gradients of each version, and drops later ones.

    TensorFlow's SyncReplicasOptimizer does the same. With R below the number of
    workers, the other workers are backups (Chen et al., "Revisiting Distributed
    Synchronous SGD", 2016, arXiv:1604.00981).

    Args:
        replicas: R. If fewer than R workers are left, the gradients of all of them are
            averaged.
    """

    def __init__(self, report: Report, replicas: int) -> None:
        super().__init__(report)
        self._replicas = replicas
        self._pushed: set[int] = set()

    def begin(self, workers: Iterable[int]) -> None:
        super().begin(workers)
        self._pushed = set()

    def _push(self, worker: int, computed_with: int) -> Decision:
        if computed_with < self.version:
            self.report.dropped += 1
            return Decision(answer=(worker,))
        self._pushed.add(worker)
        return self._update_if_due()

    def leave(self, worker: int) -> Decision:
        self.active.discard(worker)
        return self._update_if_due()

    def _update_if_due(self) -> Decision:
        wanted = min(self._replicas, len(self.active | self._pushed))
        if not self._pushed or len(self._pushed) < wanted:
            return Decision()
        together = tuple(sorted(self._pushed))  # a fixed order gives equal rounding
        self._pushed = set()
        self.report.updates += 1
        return Decision(apply=together, answer=together)


class AsyncUpdates(UpdatePolicy):
    """Applies each gradient when it arrives, and can hold back the fastest workers.

    After Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012. With a bound
    s, no worker begins its step c before every other worker has finished its step
    c - s: Stale Synchronous Parallel (Ho et al., "More Effective Distributed ML via a
    Stale Synchronous Parallel Parameter Server", NIPS 2013). With s = 0, all workers
    begin each step together.

    Args:
        max_staleness: s; None for no bound.
    """

    def __init__(self, report: Report, max_staleness: int | None) -> None:
        super().__init__(report)
        self._bound = max_staleness
        self._clocks: Counter[int] = Counter()
        self._held: list[int] = []

    def begin(self, workers: Iterable[int]) -> None:
        super().begin(workers)
        self._clocks = Counter(dict.fromkeys(self.active, 0))
        self._held = []

    def _push(self, worker: int, computed_with: int) -> Decision:
        self._clocks[worker] += 1
        self._held.append(worker)
        self.report.updates += 1
        return Decision(apply=(worker,), answer=self._release())

    def leave(self, worker: int) -> Decision:
        self.active.discard(worker)
        return Decision(answer=self._release())

    def _release(self) -> tuple[int, ...]:
        """Release the held workers that are within the bound, and return them."""
        slowest = min((self._clocks[worker] for worker in self.active), default=0)
        ahead = {worker: self._clocks[worker] - slowest for worker in self._held}
        bound = self._bound
        free = [w for w, lead in ahead.items() if bound is None or lead <= bound]
        self._held = [worker for worker in self._held if worker not in free]
        self.report.lead = max([self.report.lead, *(ahead[worker] for worker in free)])
        return tuple(free)
