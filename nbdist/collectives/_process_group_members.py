"""The group of ranks that a process group of torch.distributed stands for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from nbdist.errors import UsageError

from .group import Group, default_group

__all__ = ["members_of"]

_SLICE = timedelta(milliseconds=200)
_ARRIVED, _COMPLETE = "nbdist/arrived", "nbdist/complete"


def members_of(ranks: Sequence[int], store: Store, rank: int, size: int) -> Group:
    """The world's own group, or a new one of some of its ranks. All of them must call.

    Args:
        ranks: world ranks in the order of the new group; none stands for the world.
        store: where the new group's ranks, and nobody else, meet once.
        rank: this rank's number in the group, as torch.distributed has it.
        size: the group's size, likewise.

    Raises:
        UsageError: torch.distributed's numbering is another than nbdist's.
        WrongProcess: this process has joined no world.
    """
    world = default_group()
    chosen = tuple(ranks) or tuple(range(size))
    if len(chosen) != size or chosen[rank : rank + 1] != (world.rank,):
        raise UsageError(
            f"rank {rank} of {size}: expected rank {world.rank} of {world.size}, which "
            "MPI made this process; leave rank and world_size to the environment"
        )
    return _subgroup(world, chosen, store) if ranks else world


def _subgroup(world: Group, ranks: Sequence[int], store: Store) -> Group:
    # MPI makes a communicator in one blocking call: enter it once all have come.
    _meet(world, store, len(ranks))
    members = world.comm.group.Incl(ranks)
    comm = world.comm.Create_group(members)
    members.Free()
    return Group(
        comm,
        generation=world.generation,
        config=world.config,
        ranks=[world.ranks[rank] for rank in ranks],
    )


def _meet(world: Group, store: Store, size: int) -> None:
    if store.add(_ARRIVED, 1) == size:
        store.set(_COMPLETE, "")
    while not _is_set(store, _COMPLETE):
        world.raise_if_aborted()


def _is_set(store: Store, key: str) -> bool:
    """Whether the key is there, after a short wait. KeyboardInterrupt comes through."""
    try:
        store.wait([key], _SLICE)
    except dist.DistStoreError:
        return False
    return True
