"""A cluster that many tests share, because a start takes seconds."""

from __future__ import annotations

from nbdist import Cluster
from tests.remove_variables import remove_variables

__all__ = ["SharedCluster"]


class SharedCluster:
    """A cluster of CPU ranks that starts when a test first needs it.

    Args:
        n: The number of ranks.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._cluster: Cluster | None = None

    def ready(self) -> Cluster:
        """The cluster for the next test, started again if a test has damaged it."""
        if self._cluster is None:
            self._cluster = Cluster(self._n, device="cpu").start()
        return self._cluster

    def tidy(self) -> None:
        """Remove a test's variables from the ranks, which must live and be idle.

        Otherwise this stops the cluster, so that the fault of one test does not fail
        other tests.

        Raises:
            AssertionError: A rank has died, does not answer or is busy.
        """
        tidied = False
        try:
            cluster = self.ready()
            assert cluster.died() == {}
            states = cluster.status()
            doing = {
                rank: "no answer" if state is None else state["what"]
                for rank, state in states.items()
            }
            assert doing == dict.fromkeys(range(self._n))
            cluster.run(remove_variables)
            tidied = True
        finally:
            if not tidied:
                self.close()

    def close(self) -> None:
        """Stop the ranks. Safe to call twice."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop()
