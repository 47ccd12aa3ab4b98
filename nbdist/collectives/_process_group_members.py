"""The group of ranks that a process group of torch.distributed stands for."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.collectives._meeting import meet
from nbdist.collectives.group import Group
from nbdist.collectives.registry import default_group
from nbdist.errors import UsageError

__all__ = ["members_of"]


def members_of(ranks: Sequence[int], rank: int, size: int) -> Group:
    """The world's own group, or a new one of some of its ranks. All of them must call.

    Args:
        ranks: world ranks in the order of the new group; none stands for the world.
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
    return _subgroup(world, chosen) if ranks else world


def _subgroup(world: Group, ranks: Sequence[int]) -> Group:
    meet(world, ranks)
    return world.among(ranks)
