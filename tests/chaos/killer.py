"""Kills of all kinds at random moments, from a thread of its own."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Sequence

import psutil

from nbdist import Cluster
from nbdist.errors import NotRunning
from tests.chaos import faults
from tests.cluster_processes import ClusterProcesses, ComingRank, rank_parent

__all__ = ["KINDS", "Killer"]

KINDS = (
    "one rank",
    "two ranks",
    "all ranks",
    "a rank's parent",
    "a rank and the one that comes in its place",
    "a stopped rank",
    "controller",
    "mpiexec",
    "process supervisor",
)
WEIGHTS = (6, 3, 2, 3, 3, 2, 1, 1, 1)
NEWCOMER_WITHIN_S = 10.0
RECOVERED_WITHIN_S = 90.0
STOPPED_S = 0.5


class Killer:
    """Strikes a cluster again and again until it is closed.

    About every other time it does not wait for the recovery from what was before.

    Args:
        cluster: in which an elastic training runs.
        notes: what the cluster has said; it grows with each recovery.
        seed: of what is struck, and when.
        most_s: the longest wait between two strikes.
        kinds: what may be struck.
    """

    def __init__(
        self,
        cluster: Cluster,
        notes: Sequence[str],
        seed: int,
        most_s: float,
        kinds: Sequence[str] = KINDS,
    ) -> None:
        self._cluster, self._notes, self._most_s = cluster, notes, most_s
        self._chance = random.Random(seed)
        self._weights = [WEIGHTS[KINDS.index(kind)] for kind in kinds]
        self._kinds = kinds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.struck: list[str] = []
        """The kinds that were struck, in order."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Strike no more; returns when the last strike is over."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._chance.uniform(0.0, self._most_s)):
            (kind,) = self._chance.choices(self._kinds, self._weights)
            seen = len(self._notes)
            # The world may be another while we look at it: then nothing is struck.
            with contextlib.suppress(NotRunning, psutil.Error, ValueError):
                self._strike(kind)
                self.struck.append(kind)
                if self._chance.random() < 0.5:
                    self._await(lambda: len(self._notes) > seen, RECOVERED_WITHIN_S)  # noqa: B023

    def _await(self, condition: Callable[[], bool], within_s: float) -> None:
        """Until the condition holds, the killer is closed, or the time is up."""
        for _ in range(round(within_s / 0.02)):
            if condition() or self._over.wait(0.02):
                return

    def _strike(self, kind: str) -> None:
        processes = ClusterProcesses.of(self._cluster)
        infos = self._cluster.ranks
        ranks = [psutil.Process(info.pid) for info in infos]
        if kind in ("controller", "mpiexec", "process supervisor"):
            helper = processes.helper(kind)
            faults.kill([] if helper is None else [helper])
        elif kind == "a stopped rank":
            stopped = [self._chance.choice(ranks)]
            faults.stop_and_go_on(stopped, lambda: None, lambda: False, STOPPED_S)
        elif kind == "a rank's parent":
            faults.kill([rank_parent(self._chance.choice(infos))])
        elif kind == "a rank and the one that comes in its place":
            number = self._chance.randrange(len(ranks))
            coming = ComingRank(processes.run_dir, infos[number].rank)
            faults.kill([ranks[number]])
            self._await(lambda: coming.process() is not None, NEWCOMER_WITHIN_S)
            process = coming.process()
            faults.kill([] if process is None else [process])
        else:
            count = {"one rank": 1, "two ranks": 2, "all ranks": len(ranks)}[kind]
            faults.kill(self._chance.sample(ranks, min(count, len(ranks))))
