"""The group of ranks that a process group of torch.distributed stands for."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from mpi4py import MPI

from nbdist.errors import UsageError

from ._wait import wait_until
from .group import Group, default_group

__all__ = ["members_of"]

_TAGS = 32768  # the least that MPI promises


def members_of(ranks: Sequence[int], name: str, rank: int, size: int) -> Group:
    """The world's own group, or a new one of some of its ranks. All of them must call.

    Args:
        ranks: world ranks in the order of the new group; none stands for the world.
        name: the new group's, the same on its ranks and never used before.
        rank: this rank's number in the group, as torch.distributed has it.
        size: the group's size, likewise.

    Raises:
        UsageError: torch.distributed's numbering is another than nbdist's.
        WrongProcess: this process has joined no world.
    """
    world = default_group()
    chosen = tuple(ranks) or tuple(range(world.size))
    if len(chosen) != size or chosen[rank : rank + 1] != (world.rank,):
        raise UsageError(
            f"rank {rank} of {size}: expected rank {world.rank} of {world.size}, which "
            "MPI made this process; leave rank and world_size to the environment"
        )
    return _subgroup(world, chosen, name) if ranks else world


def _subgroup(world: Group, ranks: Sequence[int], name: str) -> Group:
    _meet(world, ranks, zlib.crc32(name.encode()) % _TAGS)
    return world.among(ranks)


def _meet(world: Group, ranks: Sequence[int], tag: int) -> None:
    comm, nothing = world.comm, bytearray()
    peers = [rank for rank in ranks if rank != world.rank]
    requests = [comm.Irecv(nothing, peer, tag) for peer in peers]
    requests += [comm.Isend(nothing, peer, tag) for peer in peers]
    wait_until(lambda: MPI.Request.Testall(requests), world.raise_if_aborted)
