"""Fault-tolerant messages, and doorbells that wake the ranks that wait for them."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from mpi4py import MPI
from torch import Tensor

from nbdist.collectives.call import Call
from nbdist.collectives.group import Group
from nbdist.collectives.mailbox import Mailbox, MailHooks, Message
from nbdist.collectives.ops.barrier import barrier
from nbdist.collectives.ops.objects import all_gather_object
from nbdist.collectives.registry import waiters
from nbdist.collectives.signature import signature
from nbdist.collectives.sync import semaphore
from nbdist.collectives.sync.shared_segment import share
from nbdist.collectives.sync.wait import complete
from nbdist.errors import CollectiveAborted
from nbdist.wire import CollectiveCall

__all__ = [
    "Doorbell",
    "TolerantMessages",
]

_POLL_S = 1e-3
"""Longest sleep between two checks of a rank whose doorbell cannot ring."""


class Doorbell:
    """A semaphore for each rank of a group, in a shared segment.

    If the ranks cannot share a segment, `ring` does nothing and `wait` sleeps briefly.
    """

    def __init__(self, group: Group) -> None:
        """Make the doorbells. Every rank of the group must call."""
        self._segment = share(
            group.size * semaphore.SEMAPHORE_BYTES,
            group.rank,
            group.hosts,
            partial(all_gather_object, group=group),
        )
        self._own = group.rank
        if self._segment is not None:
            self._segment.close_file()
            view = ctypes.c_char.from_buffer(self._segment.memory)
            self._base = ctypes.addressof(view)
            semaphore.initialise(self._address(self._own))
        barrier(group=group)

    def _address(self, rank: int) -> int:
        return self._base + rank * semaphore.SEMAPHORE_BYTES

    def ring(self, rank: int) -> None:
        """Wake the rank at a position in the group.

        If the rank does not wait, its next `wait` returns at once.
        """
        if self._segment is not None:
            semaphore.post(self._address(rank))

    def wait(self, seconds: float) -> bool:
        """Sleep until the doorbell rings, a signal arrives or the time is up.

        Returns:
            Whether the doorbell rang.
        """
        if self._segment is None:
            time.sleep(min(seconds, _POLL_S))
            return False
        own = self._address(self._own)
        if not semaphore.wait(own, seconds):
            return False
        while semaphore.try_wait(own) == 0:
            pass  # one wait uses up all rings before it
        return True


_SPINS = 50
_FIRST_PAUSE_S = 20e-6
_BUSY_PAUSE_S = 1e-3
_NAP_S = 0.05
"""Longest sleep between two checks. A ring ends the sleep."""


class TolerantMessages:
    """Point-to-point messages that continue when a rank dies.

    When a member of a `Group` dies, the group is broken for all members. These messages
    use MPI's fault tolerance (Bland et al., "Post-failure recovery of MPI communication
    capability", IJHPCA 2013), so only messages from and to the dead rank fail. `lost`
    has the dead ranks.

    A waiting rank sleeps until a sender wakes it. All ranks are world ranks.
    """

    def __init__(self, group: Group) -> None:
        """Connect the ranks of a group. Every rank of the group must call."""
        self.rank = group.ranks[group.rank]
        self.lost: dict[int, str] = {}
        """Ranks that send no further message, each with the reason."""
        self._ranks = group.ranks
        self._position = {rank: index for index, rank in enumerate(group.ranks)}
        self._error: BaseException | None = None
        self._awaited: tuple[Call, tuple[int, ...]] | None = None
        self._comm, request = group.comm.Idup()
        complete([request], group.raise_if_aborted, self._comm)
        # A message that reaches a rank before it has the new communicator can be lost.
        # The constructor of Doorbell ends with a barrier.
        self._bell = Doorbell(group)
        hooks = MailHooks(self._check, lambda _message: None, self.abort)
        self._mailbox = Mailbox(self._comm, hooks)
        waiters.add(self)

    def send(self, tensor: Tensor, to: int, tag: int) -> Message:
        """Start to send a tensor, which must not change until the message is complete.

        Call `ring` once after a series of sends.
        """
        return self._mailbox.send(tensor, self._position[to], tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Message:
        """Start to receive into a contiguous tensor on the CPU."""
        return self._mailbox.receive(tensor, self._position[source], tag)

    def ring(self, rank: int) -> None:
        """Wake a waiting rank, after messages were sent to it."""
        self._bell.ring(self._position[rank])

    def wait(
        self,
        ready: Callable[[], bool],
        *,
        what: str,
        awaited: Callable[[], Collection[int]],
        moving: Callable[[], bool] = lambda: True,
    ) -> None:
        """Sleep until `ready()`, which is called after each ring and at intervals.

        Args:
            ready: tests messages. They make progress only in this test.
            what: the name of the wait, for errors and for the status of this rank.
            awaited: the ranks whose messages can end the wait.
            moving: whether messages are under way. `ready` is then called more often.

        Raises:
            BaseException: The error of `abort`. Every later wait raises it too.
        """
        for _ in range(_SPINS):
            if ready():
                return
        call = Call(signature(what, None, None, None, (), "none"))
        try:
            pause = _FIRST_PAUSE_S
            while not ready():
                self._awaited = call, tuple(sorted(awaited()))
                self._check()
                rung = self._bell.wait(pause)
                longest = _BUSY_PAUSE_S if moving() else _NAP_S
                pause = _FIRST_PAUSE_S if rung else min(pause * 1.5, longest)
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            self._awaited = None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    # -- the `Waiter` protocol -----------------------------------------------------

    @property
    def call(self) -> CollectiveCall | None:
        """This rank's wait. Its members are this rank and the awaited ranks."""
        now = self._awaited
        if now is None:
            return None
        call, others = now
        return replace(call.record(self.rank), members=(self.rank, *others))

    @property
    def broken(self) -> bool:
        """Whether `abort` was called. The ranks must then connect again."""
        return self._error is not None

    def abort(self, error: BaseException) -> None:
        """Release this rank's wait, not those of other ranks. Any thread may call."""
        if self._error is None:
            self._error = error
        self._bell.ring(self._position[self.rank])

    def lose(self, ranks: Collection[int], reason: str) -> None:
        """Record ranks that send no further message. Any thread may call."""
        for rank in ranks:
            if rank in self._position:
                self.lost.setdefault(rank, reason)
        self._bell.ring(self._position[self.rank])

    def close(self) -> None:
        """End all messages under way. Every rank should call. Safe to call twice."""
        waiters.discard(self)
        self.abort(CollectiveAborted("the groups of ranks were renewed"))
        with contextlib.suppress(NotImplementedError, MPI.Exception):
            self._comm.Revoke()
