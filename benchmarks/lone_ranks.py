"""Makes each rank of a cluster the only one of its MPI world.

Imported by the fork server (`NBDIST_PRELOAD`). Ranks then start without MPI's exchange
between all of them, which takes minutes for hundreds of ranks on two cores. All that
the notebook does with the ranks is as it always is. They have no collectives.
"""

from __future__ import annotations

import os
from typing import Any

from nbdist.engine import torch_group, world

OF_LAUNCHER = ("OMPI_COMM_WORLD_", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SERVER_")
"""The beginnings of the variables by which a rank finds the others."""
_join = world.join


class _LoneWorld(world.World):
    """A world of one rank, which has the number and the size of the cluster's."""

    def __init__(self, comm: Any, generation: int = 0) -> None:
        super().__init__(comm, generation)
        self._number = int(os.environ["RANK"])
        self._count = int(os.environ["WORLD_SIZE"])

    @property
    def rank(self) -> int:
        return self._number

    @property
    def size(self) -> int:
        return self._count

    def publish_environment(self) -> None:
        pass


def join() -> world.World:
    """Enter a world of one rank, without MPI's launcher."""
    number = os.environ["OMPI_COMM_WORLD_RANK"]
    count = os.environ["OMPI_COMM_WORLD_SIZE"]
    for name in [each for each in os.environ if each.startswith(OF_LAUNCHER)]:
        del os.environ[name]
    os.environ.update(
        RANK=number, WORLD_SIZE=count, LOCAL_RANK=number, LOCAL_WORLD_SIZE=count
    )
    return _join()


world.World = _LoneWorld  # type: ignore[misc]
world.join = join
torch_group.start = lambda *_arguments: None
