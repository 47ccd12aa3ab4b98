"""Waiting for the members of a group that is about to be made."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Collection, Sequence
from dataclasses import replace

from nbdist.collectives.call import Call
from nbdist.collectives.call_site import find_call_site
from nbdist.collectives.group import Group
from nbdist.collectives.registry import default_group, waiters
from nbdist.collectives.signature import signature
from nbdist.collectives.sync.wait import complete
from nbdist.errors import CollectiveAborted, UsageError
from nbdist.wire import CollectiveCall

__all__ = [
    "meet",
    "members_of",
]

_TAGS = 32768  # the least that MPI promises


def meet(world: Group, ranks: Sequence[int]) -> None:
    """Wait until each of these ranks has come to make a group of all of them.

    Whoever makes several groups of the same ranks meets them in the same order.

    Raises:
        CollectiveAborted: one of them will not come. The world's group is spent.
    """
    _Meeting(world, ranks).wait()


class _Meeting:
    """A `Waiter`: the notebook sees who waits here, and lets out who waits in vain."""

    def __init__(self, world: Group, ranks: Sequence[int]) -> None:
        self._world = world
        self._ranks = tuple(ranks)
        self._error: BaseException | None = None
        self._call = Call(signature("new_group", None, None, None, (), "none"))
        self._call.call_site = find_call_site(sys._getframe())

    def wait(self) -> None:
        # Not the group's name: torch counts groups on each rank for itself, and the
        # counts differ once a cell has made one on some ranks alone. What was left of
        # a meeting that failed lies under an older generation.
        key = repr((self._world.generation, self._ranks)).encode()
        comm, nothing, tag = self._world.comm, bytearray(), zlib.crc32(key) % _TAGS
        peers = [rank for rank in self._ranks if rank != self._world.rank]
        requests = [comm.Irecv(nothing, peer, tag) for peer in peers]
        requests += [comm.Isend(nothing, peer, tag) for peer in peers]
        waiters.add(self)
        try:
            complete(requests, self._check, nothing)
        except BaseException:
            self._world.abort(CollectiveAborted("a group's making was left halfway"))
            raise
        finally:
            waiters.discard(self)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)
        self._world.raise_if_aborted()

    @property
    def call(self) -> CollectiveCall:
        """What this rank waits for."""
        return replace(self._call.record(self._world.rank), members=self._ranks)

    @property
    def broken(self) -> bool:
        """Whether it was left halfway; then the world's group tells so."""
        return False

    def abort(self, error: BaseException) -> None:
        """Let this rank out. Any thread may call."""
        self._error = error

    def lose(self, ranks: Collection[int], reason: str) -> None:
        """These ranks will not come any more. Any thread may call."""
        if not set(ranks).isdisjoint(self._ranks):
            self._error = CollectiveAborted(f"released from new_group: {reason}")

    def close(self) -> None:
        """The ranks meet anew: what was under way is given up."""
        self.abort(CollectiveAborted("the ranks meet anew"))


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
