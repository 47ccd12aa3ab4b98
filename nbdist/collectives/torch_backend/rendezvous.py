"""The rendezvous of the members of a new process group."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from nbdist.collectives.call import Call
from nbdist.collectives.call_site import find_call_site
from nbdist.collectives.group import Group
from nbdist.collectives.registry import default_group, waiters
from nbdist.collectives.signature import signature
from nbdist.collectives.sync.attempt import attempt
from nbdist.collectives.sync.wait import Check, complete
from nbdist.errors import CollectiveAborted, UsageError
from nbdist.wire import CollectiveCall

__all__ = [
    "Rendezvous",
    "members_of",
    "rendezvous",
]

_TAGS = 32768  # the least that MPI promises
_WORD_BYTES = 64


def rendezvous(world: Group, ranks: Sequence[int], word: str = "") -> list[str]:
    """Wait until each of these ranks has called. Each of them must call.

    If the same ranks make several groups, all must make them in the same order.

    Args:
        world: the world's group.
        ranks: world ranks, this rank among them.
        word: up to 64 bytes for the other ranks.

    Returns:
        The word of each of the ranks, in their order.

    Raises:
        CollectiveAborted: One of the ranks has died. The world's group is broken.
    """
    # torch's name of the group cannot be the key. Each rank numbers its groups, and the
    # numbers differ if a cell has made a group on some ranks only. Messages of a failed
    # rendezvous have the tag of an older generation.
    try:
        return Rendezvous(world, ranks, "new_group").wait(world.raise_if_aborted, word)
    except BaseException:
        world.abort(CollectiveAborted("the rendezvous of a new group was interrupted"))
        raise


class Rendezvous:
    """A wait for ranks that the notebook can see and release: a `Waiter`.

    Args:
        world: The world's group.
        ranks: World ranks, this rank among them.
        operation: The name of the call that waits.
        key: Equal on all ranks. Rendezvous of the same ranks with different keys can
            fail or wait without an effect on each other.
    """

    def __init__(
        self, world: Group, ranks: Sequence[int], operation: str, key: object = None
    ) -> None:
        self._world = world
        self._ranks = tuple(ranks)
        text = repr((world.generation, self._ranks, key))
        self._tag = zlib.crc32(text.encode()) % _TAGS
        self._error: BaseException | None = None
        self._call = Call(signature(operation, None, None, None, (), "none"))
        self._call.call_site = find_call_site(sys._getframe())

    def wait(self, check: Check, word: str = "") -> list[str]:
        """Wait until each of the ranks waits. `check` ends the wait by raising.

        Returns:
            The word of each of the ranks, in their order.
        """

        comm, own = self._world.comm, self._world.rank
        words = {rank: bytearray(_WORD_BYTES) for rank in self._ranks}
        words[own][:] = word.encode().ljust(_WORD_BYTES, b"\0")
        peers = [rank for rank in self._ranks if rank != own]
        requests = [comm.Irecv(words[peer], peer, self._tag) for peer in peers]
        requests += [comm.Isend(words[own], peer, self._tag) for peer in peers]
        with self._visible(check) as check_both:
            complete(requests, check_both, words)
        return [each.rstrip(b"\0").decode() for each in words.values()]

    def attempt(self, work: Callable[[], object], check: Check) -> None:
        """Call `work` in a thread, and wait until it has succeeded on all these ranks.

        Raises:
            CollectiveAborted: It has failed on another rank.
        """
        with self._visible(check) as check_both:
            failed = attempt(work, self._world.comm, self._ranks, self._tag, check_both)
        if failed:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            operation = self._call.kind.operation
            raise CollectiveAborted(f"released from {operation}: {said}")

    @contextmanager
    def _visible(self, check: Check) -> Iterator[Check]:
        """Let the notebook see and release the wait in this block."""

        def check_both() -> None:
            if self._error is not None:
                raise self._error.with_traceback(None)
            check()

        waiters.add(self)
        try:
            yield check_both
        finally:
            waiters.discard(self)

    @property
    def call(self) -> CollectiveCall:
        """The call that this rank is in."""
        return replace(self._call.record(self._world.rank), members=self._ranks)

    @property
    def broken(self) -> bool:
        """False. A rendezvous that fails breaks the world's group instead."""
        return False

    def abort(self, error: BaseException) -> None:
        """Release this rank. Any thread may call."""
        self._error = error

    def lose(self, ranks: Collection[int], reason: str) -> None:
        """Release this rank if one of these is a member. Any thread may call."""
        if not set(ranks).isdisjoint(self._ranks):
            operation = self._call.kind.operation
            self._error = CollectiveAborted(f"released from {operation}: {reason}")

    def close(self) -> None:
        """Release this rank: the groups are renewed or closed."""
        self.abort(CollectiveAborted("the groups of ranks were renewed"))


def members_of(ranks: Sequence[int], rank: int, size: int) -> Group:
    """The world's group, or a new group of some of its ranks. These ranks must call.

    Args:
        ranks: world ranks in the order of the new group; empty for the world's group.
        rank: this rank's number in the group, from torch.distributed.
        size: the group's size, from torch.distributed.

    Raises:
        UsageError: torch.distributed and nbdist number the ranks differently.
        WrongProcess: This process is not a rank.
    """
    world = default_group()
    chosen = tuple(ranks) or tuple(range(world.size))
    if len(chosen) != size or chosen[rank : rank + 1] != (world.rank,):
        raise UsageError(
            f"rank {rank} of {size}: expected rank {world.rank} of {world.size}, as in "
            "MPI; leave rank and world_size to the environment"
        )
    return _subgroup(world, chosen) if ranks else world


def _subgroup(world: Group, ranks: Sequence[int]) -> Group:
    rendezvous(world, ranks)
    return world.among(ranks)
