"""A kept cluster that a process looks at beside the notebook that is attached."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nbdist.clusters.cluster import compared_by_digests
from nbdist.clusters.kept.kept_cluster import KeptCluster
from nbdist.ipc import endpoints
from nbdist.wire import Comparison, RankInfo, Shown

__all__ = ["Visitor"]

COMPARISON_LIMIT_S = 20.0
"""Seconds in which idle ranks measure the differences of a value."""


class Visitor(KeptCluster):
    """The methods of a kept cluster for a process that is not its notebook.

    A notebook may be attached meanwhile, or none: a visitor does not keep the cluster
    from its end. Its cells and calls run in turn with the notebook's, which is told of
    a visitor's cells, and of a call for which its own cell waits. It is sent neither
    notes nor the values that ranks log.
    """

    purpose = "visit"

    @property
    def infos(self) -> list[RankInfo]:
        """Every rank, including dead ones, in rank order."""
        infos: list[RankInfo] = self._look("infos")
        return infos

    @property
    def size(self) -> int:
        """The world size."""
        return len(self.infos)

    def look(self, expression: str) -> dict[int, Shown | None]:
        """As `Cluster.look` of busy ranks, also while they are idle.

        No cell waits for it: another thread of each rank evaluates the expression.
        """
        return self._beside(endpoints.LOOK, expression)[0]

    def compare(
        self, expression: str, *, timeout_s: float | None = COMPARISON_LIMIT_S
    ) -> Comparison:
        """As `Cluster.compare`. Idle ranks compare the value as busy ranks do.

        Only if it is not equal do their main threads measure how far it differs.
        """
        answers, is_busy = self._beside(endpoints.LEAVES, expression)
        found = replace(compared_by_digests(answers), were_busy=is_busy)
        is_equal = not found.errors and all(leaf.is_equal for leaf in found.leaves)
        if is_busy or is_equal:
            return found
        return super().compare(expression, timeout_s=timeout_s)

    def _beside(self, target: str, expression: str) -> tuple[dict[int, Any], bool]:
        """Call an endpoint on the ranks that answer, and whether a rank is busy."""
        states = {r: s for r, s in self.status().items() if s is not None}
        answers = self._ask(target, expression, ranks=list(states))
        living = [info.rank for info in self.ranks]
        is_busy = any(state["what"] is not None for state in states.values())
        return dict.fromkeys(living) | answers, is_busy
