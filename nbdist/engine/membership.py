"""Changing the world: ranks that have died or leave, and ranks that join.

All who stay carry out one `wire.Change` together. Where a rank has died they shrink the
communicator (MPI's User-Level Failure Mitigation: `MPIX_Comm_revoke`, then
`MPIX_Comm_shrink`; see Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 2013); newcomers are spawned by them and merged into it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nbdist.collectives import close_groups
from nbdist.engine import torch_group, witness, world
from nbdist.engine.rank import this_rank
from nbdist.wire import Change, RankInfo

__all__ = ["change"]


def change(plan: Change) -> RankInfo | None:
    """Go over to the next generation. Every rank that lives must call.

    Process groups and groups of ranks of the old generation are closed; variables stay.

    Returns:
        This rank as it is now; None where the plan lets it go.
    """
    rank = this_rank()
    close_groups()
    torch_group.stop()
    comm = _without_the_dead(world.current().comm, plan)
    number = plan.numbers.get(rank.info.rank)
    comm = _split(comm, number)
    if number is None:
        return None
    if plan.joins:
        comm = _admit(comm, plan, number)
    here = world.enter(comm, plan.generation)
    here.publish_environment()
    owns_gpu = rank.info.device_uuid is not None and not rank.assignment.shares_gpu
    torch_group.start(rank.run_dir, owns_gpu, plan.generation)
    _tell(here)
    return rank.info


def _without_the_dead(comm: Any, plan: Change) -> Any:
    if not plan.broken:
        return comm
    comm.Revoke()
    return comm.Shrink()


def _split(comm: Any, number: int | None) -> Any:
    """The communicator of those who stay, in their new order."""
    from mpi4py import MPI

    if number is None:
        return comm.Split(MPI.UNDEFINED)
    return comm.Split(0, key=number)


def _admit(comm: Any, plan: Change, number: int) -> Any:
    """Start the newcomers, and meet them."""
    commands = [
        witness.command("--join", str(join.rank), str(plan.generation))
        for join in plan.joins
    ]
    programs = [program for program, *_ in commands]
    arguments = [rest for _, *rest in commands]
    bridge = comm.Spawn_multiple(programs, arguments, [1] * len(commands), root=0)
    return bridge.Merge(high=False).Split(0, key=number)


def _tell(here: world.World) -> None:
    """Let everything on this rank know its new number."""
    rank = this_rank()
    rank.info = replace(
        rank.info,
        rank=here.rank,
        world_size=here.size,
        local_rank=here.local_rank,
        local_world_size=here.local_size,
        generation=here.generation,
        transport=here.group.describe(),
    )
    rank.recorder.rank = here.rank
    rank.tell_namespace()
