"""What a server does with each gradient: pure bookkeeping, without a tensor or a rank.

`push` and `leave` return a `Decision`; the server carries it out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Async", "Decision", "Ledger", "Report", "Sync"]


@dataclass
class Report:
    """What one server has counted."""

    updates: int = 0
    """How often its parameters have changed."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many gradients were computed with parameters that were so many updates old
    when they came."""
    dropped: int = 0
    """Gradients that came too late to be used."""
    lead: int = 0
    """How many steps the fastest worker was ahead of the slowest, at most, when it was
    given parameters to go on."""


@dataclass(frozen=True)
class Decision:
    """What to do now."""

    apply: tuple[int, ...] = ()
    """The workers whose gradients to average and apply, in this order; none: nothing
    changes."""
    answer: tuple[int, ...] = ()
    """The workers to send the parameters to, as they are then."""


class Ledger(ABC):
    """Counts one server's updates.

    Args:
        report: goes on being counted in.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self.active: set[int] = set()
        """Workers of which more gradients may come."""

    @property
    def version(self) -> int:
        """Updates so far."""
        return self.report.updates

    def begin(self, workers: Iterable[int]) -> None:
        """These workers begin to train."""
        self.active = set(workers)

    def push(self, worker: int, computed_with: int) -> Decision:
        """A worker's gradient has come, computed with that version's parameters."""
        self.report.staleness[self.version - computed_with] += 1
        return self._push(worker, computed_with)

    @abstractmethod
    def _push(self, worker: int, computed_with: int) -> Decision: ...

    @abstractmethod
    def leave(self, worker: int) -> Decision:
        """A worker has ended, failed or died; what it has pushed counts."""


class Sync(Ledger):
    """Averages the first R gradients of each version, and drops those that come later.

    This is what TensorFlow's SyncReplicasOptimizer does; with R below the number of
    workers, the others are backups (Chen et al., "Revisiting Distributed Synchronous
    SGD", 2016, arXiv:1604.00981).

    Args:
        replicas: R; never more are waited for than are there.
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
        together = tuple(sorted(self._pushed))  # one order: one rounding
        self._pushed = set()
        self.report.updates += 1
        return Decision(apply=together, answer=together)


class Async(Ledger):
    """Applies each gradient as it comes (Dean et al., "Large Scale Distributed Deep
    Networks", NIPS 2012), and may hold back workers that are too far ahead.

    With a bound s, no worker begins its step c before every other one has finished its
    step c - s: Stale Synchronous Parallel (Ho et al., "More Effective Distributed ML
    via a Stale Synchronous Parallel Parameter Server", NIPS 2013). s = 0 lets all begin
    each step together.

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
        return Decision(apply=(worker,), answer=self._let_go())

    def leave(self, worker: int) -> Decision:
        self.active.discard(worker)
        return Decision(answer=self._let_go())

    def _let_go(self) -> tuple[int, ...]:
        """The held workers that may go on now."""
        slowest = min((self._clocks[worker] for worker in self.active), default=0)
        ahead = {worker: self._clocks[worker] - slowest for worker in self._held}
        bound = self._bound
        free = [w for w, lead in ahead.items() if bound is None or lead <= bound]
        self._held = [worker for worker in self._held if worker not in free]
        self.report.lead = max([self.report.lead, *(ahead[worker] for worker in free)])
        return tuple(free)
