"""Kills processes of a cluster at random moments, on its own thread."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Sequence

import psutil

from nbdist import Cluster
from nbdist.errors import NotRunning
from tests.chaos import faults
from tests.cluster_processes import ClusterProcesses, StartingRank, rank_parent

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
    """Kills processes of a cluster until it is closed.

    About every other time it does not wait for the recovery from the kill before.

    Args:
        cluster: a cluster that runs an elastic training.
        notes: the cluster's notes. Each recovery adds one.
        seed: the seed of the victims and the moments.
        most_s: the longest wait between two kills, in seconds.
        kinds: the kinds of kills to choose from.
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
        self.kills: list[str] = []
        """The kinds of the kills so far, in order."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop killing. Returns when the last kill is complete."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._chance.uniform(0.0, self._most_s)):
            (kind,) = self._chance.choices(self._kinds, self._weights)
            seen = len(self._notes)
            # The world may change during the choice. Then no process is killed.
            with contextlib.suppress(NotRunning, psutil.Error, ValueError):
                self._kill(kind)
                self.kills.append(kind)
                if self._chance.random() < 0.5:
                    self._await(lambda: len(self._notes) > seen, RECOVERED_WITHIN_S)  # noqa: B023

    def _await(self, condition: Callable[[], bool], within_s: float) -> None:
        """Wait until the condition holds, the killer is closed, or the time is up."""
        for _ in range(round(within_s / 0.02)):
            if condition() or self._over.wait(0.02):
                return

    def _kill(self, kind: str) -> None:
        processes = ClusterProcesses.of(self._cluster)
        infos = self._cluster.ranks
        ranks = [psutil.Process(info.pid) for info in infos]
        if kind in ("controller", "mpiexec", "process supervisor"):
            helper = processes.helper(kind)
            faults.kill([] if helper is None else [helper])
        elif kind == "a stopped rank":
            stopped = [self._chance.choice(ranks)]
            faults.stop_and_continue(stopped, lambda: None, lambda: False, STOPPED_S)
        elif kind == "a rank's parent":
            faults.kill([rank_parent(self._chance.choice(infos))])
        elif kind == "a rank and the one that comes in its place":
            number = self._chance.randrange(len(ranks))
            starting = StartingRank(processes.run_dir, infos[number].rank)
            faults.kill([ranks[number]])
            self._await(lambda: starting.process() is not None, NEWCOMER_WITHIN_S)
            process = starting.process()
            faults.kill([] if process is None else [process])
        else:
            count = {"one rank": 1, "two ranks": 2, "all ranks": len(ranks)}[kind]
            faults.kill(self._chance.sample(ranks, min(count, len(ranks))))
