"""Membership: which ranks there are, and this one's number among them.

The world is the one place that knows the MPI communicator. It hands a `Group` over it
to the collectives, and counts generations: each change of membership makes a new one.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from nbdist.collectives import Group, set_default_group

__all__ = ["World", "join"]


@dataclass(frozen=True)
class World:
    """One generation of the world, as this rank sees it."""

    comm: Any
    """The mpi4py communicator over all ranks."""
    generation: int
    group: Group

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


def join() -> World:
    """Enter the world that the MPI launcher made. Every rank must call."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    group = Group(comm)
    set_default_group(group)
    return World(comm, 0, group)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
