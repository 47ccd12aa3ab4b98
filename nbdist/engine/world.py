"""The world: all ranks, their MPI communicator, and this rank's number.

Only this module keeps the MPI communicator; the collectives get a `Group` over it. The
world's generation counts how often the ranks have rebuilt their communicators, after an
interrupt or a change of members.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from nbdist.collectives import (
    Group,
    any_broken,
    forget_unseen_errors,
    renew_groups,
    set_default_group,
)
from nbdist.collectives.sync.wait import complete
from nbdist.engine import ddp_modules, in_flight, shared_default_group, torch_group
from nbdist.engine.rank import this_rank
from nbdist.engine.revocation import revoke
from nbdist.errors import WrongProcess
from nbdist.ipc import roles
from nbdist.ipc.ports import free_ports, own_address
from nbdist.training import lasting
from nbdist.wire import RankInfo, are_unequal, differ_in_nccl

__all__ = [
    "World",
    "communicator_of",
    "current",
    "enter",
    "is_joined",
    "join",
    "join_running",
    "renew",
]


class World:
    """All ranks, from the view of this one. Every rank must construct it.

    Args:
        comm: An mpi4py communicator over all ranks, which only the world uses.
        generation: The number of this generation, from 0.
    """

    def __init__(self, comm: Any, generation: int = 0) -> None:
        self.comm = comm
        self.generation = generation
        self.shared = comm.Dup()
        """The communicator for the user's own calls of mpi4py."""
        self._shared_revoked = self._nccl_aborted = self._has_open_step = False
        self.group = Group(comm, generation=generation)
        set_default_group(self.group)

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its host."""
        hosts = self.group.hosts
        return hosts[: self.rank].count(hosts[self.rank])

    @property
    def local_size(self) -> int:
        """The number of ranks on this rank's host."""
        return self.group.hosts.count(self.group.hosts[self.rank])

    @property
    def rank(self) -> int:
        return int(self.comm.rank)

    @property
    def size(self) -> int:
        return int(self.comm.size)

    @property
    def spans_hosts(self) -> bool:
        """Whether the ranks are on several hosts."""
        return len(set(self.group.hosts)) > 1

    def publish_environment(self) -> None:
        """Set the variables that torchrun sets. Every rank must call."""
        address = own_address() if self.spans_hosts else "127.0.0.1"
        place = (address, free_ports(1, address)[0]) if self.rank == 0 else None
        address, port = self.comm.bcast(place)
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_size),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            **roles.environment(self.rank, self.size, n_ps=0),
        )

    def release(self) -> None:
        """Release this rank from calls of mpi4py and NCCL. Any thread may call."""
        self._revoke_shared()
        self.abort_nccl()

    def abort_nccl(self) -> None:
        """End this rank's calls of NCCL, also later ones. Any thread may call."""
        self._nccl_aborted |= torch_group.abort()

    def _revoke_shared(self) -> None:
        revoke(self.shared)
        self._shared_revoked = True

    def note_failure(self) -> None:
        """Note what a failed cell has left behind."""
        forget_unseen_errors()  # they mostly follow from its error
        self._has_open_step = (
            self._has_open_step or lasting.are_alive() or ddp_modules.has_open_step()
        )

    @property
    def broken(self) -> bool:
        """Whether a communicator, a group or a DDP module must be rebuilt.

        That is also so if the cell has given the default group other members, or has
        failed on a rank that has something which must begin again on all ranks.
        """
        flags = self._shared_revoked, self._nccl_aborted, self._has_open_step
        return any(flags) or any_broken() or shared_default_group.is_reconfigured()

    def renew(self, why: str = "") -> None:
        """Begin the next generation with the same ranks. Every rank must call.

        Args:
            why: The reason, for the errors of the calls that this ends.
        """
        self.generation += 1
        self._revoke_shared()
        self.shared = self.comm.Dup()
        self._shared_revoked = False
        if self._nccl_has_failed():
            torch_group.renew_nccl(self.generation)
            self._nccl_aborted = False
        renew_groups(self.generation, why)
        in_flight.renew_differing_gloo(self.comm)
        torch_group.equalize_group_counts(self.comm)
        torch_group.end_batches()
        shared_default_group.begin_again()
        lasting.begin_again(self.comm.allgather)
        forget_unseen_errors()
        self._has_open_step = False

    def _nccl_has_failed(self) -> bool:
        """Whether NCCL's groups must be made again. Every rank must call.

        After an abort on one rank, they work on no rank, and a group whose time-out has
        passed reports that from then on. If the ranks have queued unequal numbers of
        collectives, or different ones, the GPUs of some ranks may wait forever. This
        waits for the work that all ranks have queued.
        """
        mine = torch_group.nccl_calls()
        # A group that has changed its members has a part of NCCL on some ranks only.
        lost = shared_default_group.is_reconfigured() and torch_group.uses_nccl()
        lost |= self._nccl_aborted or torch_group.has_failed_connection()
        lost |= any(total.late_s for total in mine.values())
        everyones = self.comm.allgather((lost, mine))
        if any(failed for failed, _ in everyones):
            return True
        if not differ_in_nccl({r: calls for r, (_, calls) in enumerate(everyones)}):
            return False
        counts = [
            {name: total.number for name, total in each.items()}
            for _, each in everyones
        ]
        own = counts[self.rank]
        has_fewest = all(
            n <= each.get(name, n) for name, n in own.items() for each in counts
        )
        if are_unequal(counts) and has_fewest:
            torch_group.finish()
        self.comm.Barrier()
        return True


_world: World | None = None
_comms: dict[int, Any] = {}
"""The communicators of the worlds that this rank has entered, by generation. They are
removed once the ranks agree on the communicator that they build on."""


def current() -> World:
    """The world that this rank is in.

    Raises:
        WrongProcess: This process has joined no world.
    """
    if _world is None:
        raise WrongProcess(
            "this process is not a rank: put the call in a %%distributed cell, or call "
            "nbdist.init() first in a script that mpiexec runs"
        )
    return _world


def is_joined() -> bool:
    """Whether this process is in a world."""
    return _world is not None


def join() -> World:
    """Enter the world of the MPI launcher. Every rank must call."""
    MPI = _initialized_mpi()
    # Ranks that wait in a blocking call poll, and take the cores from those that are
    # still in MPI_Init.
    complete([MPI.COMM_WORLD.Ibarrier()], check=lambda: None)
    return enter(MPI.COMM_WORLD.Dup(), 0)


def join_running(rank: int, generation: int) -> World:
    """Enter the running world that has spawned this process.

    Args:
        rank: This process's number in the world.
        generation: The generation that the world begins with it.
    """
    MPI = _initialized_mpi()
    bridge = MPI.Comm.Get_parent()
    return enter(bridge.Merge(high=True).Split(0, key=rank), generation)


def _initialized_mpi() -> Any:
    """mpi4py's MPI, initialised. Its import does that, except in a forked rank."""
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def enter(comm: Any, generation: int) -> World:
    """Make the world of a communicator. All its ranks must call."""
    global _world
    from mpi4py import MPI

    comm.Set_errhandler(MPI.ERRORS_RETURN)
    _comms[generation] = comm
    _world = World(comm, generation)
    if generation:
        lasting.begin_again(comm.allgather)
    return _world


def communicator_of(generation: int) -> Any:
    """The communicator of a generation of the world, for the ranks to build on.

    The communicators of other generations are removed.
    """
    global _comms
    _comms = {generation: _comms[generation]}
    return _comms[generation]


def renew(why: str = "") -> RankInfo:
    """Rebuild the groups after a collective was interrupted on some rank.

    Every rank must call, from its main thread. Returns this rank's new description.

    Args:
        why: As for `World.renew`.
    """
    here = current()
    here.renew(why)
    rank = this_rank()
    rank.info = replace(rank.info, generation=here.generation)
    return rank.info
