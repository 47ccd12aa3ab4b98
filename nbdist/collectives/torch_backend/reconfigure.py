"""The members of a process group that changes them in place, c10d's `reconfigure`.

Each rank gives the others a handle, by a store or another way of the user's. The ranks
that are to be members then call `reconfigure` with all their handles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from mpi4py import MPI

from nbdist.collectives.group import Group
from nbdist.collectives.registry import default_group
from nbdist.collectives.sync import timeout_clock
from nbdist.collectives.sync.wait import Check
from nbdist.collectives.torch_backend.rendezvous import Rendezvous
from nbdist.errors import CollectiveAborted, CollectiveTimeout, UsageError
from nbdist.wire import format_ranks

__all__ = ["Reconfiguration", "handle"]

_PREFIX = "nbdist"


def handle() -> str:
    """The handle of this rank, which is valid until the world changes its members."""
    world = default_group()
    return f"{_PREFIX}:{world.generation}:{world.rank}"


class Reconfiguration:
    """The way to a new group of living ranks. Each of them must make one and call it.

    Args:
        uuid: Equal on all of these ranks, and different for each reconfiguration.
        handles: A handle of each rank. A sequence gives the order of the new group;
            the ranks of a set are in the order of the world.
        timeout: How long to wait for the other ranks.

    Raises:
        UsageError: A handle is not of the world's generation, or this rank's is not
            among them.
    """

    def __init__(self, uuid: int, handles: Collection[str], timeout: timedelta) -> None:
        self._world = world = default_group()
        ranks = [_rank_of(each, world) for each in handles]
        self._ranks = ranks if isinstance(handles, Sequence) else sorted(ranks)
        if world.rank not in ranks or len(set(ranks)) != len(ranks):
            raise UsageError(
                f"the handles are those of rank {format_ranks(ranks)}: expected this "
                f"rank's, {handle()!r}, among them, and each once"
            )
        self._timeout = timeout
        self._key = uuid, tuple(self._ranks)
        self._before, self._after = (
            Rendezvous(world, self._ranks, "reconfigure", (*self._key, when))
            for when in ("before", "after")
        )

    def __call__(self) -> Group:
        """Wait for the other ranks, and make the group.

        Raises:
            CollectiveTimeout: A rank did not call in time.
            CollectiveAborted: A rank has died, or this rank was released.
        """
        text = repr((self._world.generation, self._key))
        digest = hashlib.sha256(text.encode()).hexdigest()
        deadline = self._deadline()
        try:
            self._before.wait(deadline)
            group = self._world.among_living(self._ranks, f"{_PREFIX}-{digest}")
            try:
                # A rank may leave at once. The others must have connected by then.
                self._after.wait(deadline)
            except BaseException:
                group.give_up(CollectiveAborted("the process group was not completed"))
                raise
            return group
        except MPI.Exception as error:
            raise CollectiveAborted(
                f"reconfigure with rank {format_ranks(self._ranks)} failed in MPI: "
                f"{error}"
            ) from error

    def abort(self, error: BaseException) -> None:
        """Release this rank while it waits. Any thread may call."""
        self._before.abort(error)
        self._after.abort(error)

    def _deadline(self) -> Check:
        end = timeout_clock.now() + self._timeout.total_seconds()

        def check() -> None:
            if timeout_clock.now() > end:
                raise CollectiveTimeout(
                    f"reconfigure: not all of rank {format_ranks(self._ranks)} have "
                    f"called within {self._timeout.total_seconds():g} s"
                )

        return check


def _rank_of(text: Any, world: Group) -> int:
    """The world rank that a handle names."""
    prefix, _, rest = str(text).partition(":")
    generation, _, rank = rest.partition(":")
    if prefix != _PREFIX or not (generation.isdecimal() and rank.isdecimal()):
        raise UsageError(
            f"the handle {text!r}: expected one such as {handle()!r}, from "
            "get_reconfigure_handle on a rank of this world"
        )
    if int(generation) != world.generation or int(rank) >= world.size:
        raise UsageError(
            f"the handle {text!r} is of another world than this one, which is "
            f"generation {world.generation} with {world.size} ranks: call "
            "get_reconfigure_handle again on its rank"
        )
    return int(rank)
