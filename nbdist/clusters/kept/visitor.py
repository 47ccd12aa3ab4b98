"""A kept cluster that a process looks at beside the notebook that is attached."""

from __future__ import annotations

from nbdist.clusters.kept.kept_cluster import KeptCluster
from nbdist.wire import RankInfo

__all__ = ["Visitor"]


class Visitor(KeptCluster):
    """The methods of a kept cluster for a process that is not its notebook.

    A notebook may be attached meanwhile, or none: a visitor does not keep the cluster
    from its end. Its cells and calls run in turn with the notebook's, which is told of
    a visitor's cells. It is sent neither notes nor the values that ranks log.
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
