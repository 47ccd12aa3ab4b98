"""Membership: which ranks there are, and this one's number among them.

The world is the one place that knows the MPI communicator. It hands a `Group` over it
to the collectives, and counts generations: each time the ranks had to meet anew, after
an interrupt or a change of membership, is one.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import Any

from nbdist.collectives import Group, renew_groups, set_default_group
from nbdist.engine.rank import this_rank
from nbdist.wire import RankInfo

__all__ = ["World", "join", "renew"]


class World:
    """The ranks, as this one sees them. Every rank must make it together.

    Args:
        comm: An mpi4py communicator over all ranks, used for nothing else.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.generation = 0
        self.group = Group(comm)
        set_default_group(self.group)

    @property
    def rank(self) -> int:
        return int(self.comm.rank)

    @property
    def size(self) -> int:
        return int(self.comm.size)

    def local_place(self) -> tuple[int, int]:
        """(local rank, local world size): this rank among those of its host."""
        from mpi4py import MPI

        local = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            return int(local.rank), int(local.size)
        finally:
            local.Free()

    def publish_environment(self) -> None:
        """Set the variables that torchrun sets. Every rank must call."""
        local_rank, local_size = self.local_place()
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.size),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(local_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.comm.bcast(_free_port() if self.rank == 0 else None)),
        )

    def renew(self) -> None:
        """Begin the next generation with the same ranks. Every rank must call."""
        self.generation += 1
        renew_groups(self.generation)


_world: World | None = None


def join() -> World:
    """Enter the world that the MPI launcher made. Every rank must call."""
    global _world
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    _world = World(comm)
    return _world


def renew() -> RankInfo:
    """Make the collectives work again, after one was left halfway on some rank.

    Every rank must call, from its main thread.
    """
    assert _world is not None
    _world.renew()
    rank = this_rank()
    rank.info = replace(rank.info, generation=_world.generation)
    return rank.info


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
