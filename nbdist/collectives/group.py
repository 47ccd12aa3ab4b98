"""Ranks that communicate: one communicator, its transports, and the running call."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch
from mpi4py import MPI

from nbdist.config import CollectiveConfig
from nbdist.errors import (
    CollectiveAborted,
    CollectiveMismatch,
    CollectiveTimeout,
    UsageError,
    WrongProcess,
)
from nbdist.wire import CollectiveCall, format_ranks

from ._call import Call, describe_mismatch, describe_timeout
from ._connect import Connection, connect
from ._handle import Handle
from ._hooks import Hooks
from ._mailbox import Mailbox, MailHooks, Message
from ._place import Place, find_place
from ._reduction import ReduceOp, parse_op
from ._signature import Signature, signature
from ._streams import on_side_stream
from ._transport import Reduction, Transport
from ._wait import seconds
from ._waiters import Waiter, waiters
from ._worker import Worker

__all__ = [
    "Group",
    "any_spent",
    "calls_made",
    "close_groups",
    "current_call",
    "default_group",
    "release_calls",
    "release_calls_with",
    "renew_groups",
    "set_default_group",
]

_live: set[Group] = set()
"""Every group that is not closed. Held, for all members must renew the same ones."""
_KEPT = 512
_numbers = itertools.count()
_FINISH_WITHIN_S = 10.0
"""A device that takes longer waits for a rank that does not come."""
_default: Group | None = None


class _OutOfTime(Exception):
    """The running call's own time-out ran out."""


class Group:
    """The ranks of one MPI communicator, for collectives among them.

    All its ranks must make the group, and must make the same calls on it in the same
    order. Once a call was left by an abort, a time-out or an interrupt, the ranks no
    longer agree on what was sent: every later call raises, until a new Group over a
    fresh communicator takes this one's place.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        generation: int = 0,
        config: CollectiveConfig | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Meet the other ranks. Every rank of `comm` must call.

        Args:
            comm: an intracommunicator; it is duplicated, and stays the caller's.
            generation: counts changes of membership.
            config: default: from the environment.
            ranks: the members' world ranks; default 0 to size-1.
        """
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.generation = generation
        self.ranks = tuple(range(comm.size) if ranks is None else ranks)
        self.config = config or CollectiveConfig.from_environment()
        self.sequence = 0
        """Collectives begun on this group so far."""
        self._error: BaseException | None = None
        self._deadline = math.inf
        self._call: Call | None = None
        self._awaited: Call | None = None
        self._noted = False
        self._turn = threading.Lock()
        self._worker = Worker(f"nbdist collectives of {self.ranks}")
        self._number = next(_numbers)
        self._connect()
        self.identity = self.ranks, self._connection.largest(self._number)
        """Equal on all members, and on no other group that lives."""
        _live.add(self)

    def _connect(self) -> None:
        hooks = Hooks(self._meet, self._differ, self._check, _leave_notes)
        self._connection: Connection = connect(self.comm, self.config, hooks)
        self._prepared: dict[object, tuple[Signature, Reduction] | None] = {}
        mail_hooks = MailHooks(self.raise_if_aborted, self._wait_for, self.abort)
        self.mailbox = Mailbox(self._connection.mail, mail_hooks)
        """Point-to-point messages among the members."""

    # -- what a collective needs ---------------------------------------------------

    def transport(
        self, device: torch.device | str, algorithm: str = "auto"
    ) -> Transport:
        """The transport for tensors on a device.

        The first time for a GPU, every member must call; that GPU stays this rank's.

        Raises:
            UsageError: there is no such algorithm, or not for this device.
        """
        kind = device if isinstance(device, str) else device.type
        if kind not in self._connection.transports:
            self._add_gpu(torch.device(device))
        gpu = self._connection.gpu
        if kind == "cuda" and device not in (kind, gpu):
            raise UsageError(
                f"a tensor on {device}: expected one on {gpu}, where this rank's "
                "others of this group were"
            )
        return self._connection.transport(kind, algorithm)

    def _add_gpu(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UsageError(f"a tensor on {device}: expected one on cpu or cuda")
        kind = signature("first_on_gpu", None, None, None, (), device.type)
        with torch.cuda.device(device):
            self.run(kind, self._connection.add_gpu)

    def prepared_all_reduce(
        self, op: ReduceOp, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> tuple[Signature, Reduction] | None:
        """What "auto" does for dense tensors of one kind in host memory, ready made.

        None, on all ranks, where the transport must look at the tensor.

        Raises:
            UsageError, UnsupportedCollective: see `parse_op`.
        """
        key = (op, dtype, shape)
        try:
            return self._prepared[key]
        except KeyError:
            found = self._prepare(*key)
        if len(self._prepared) >= _KEPT:  # shapes that never repeat
            self._prepared.clear()
        self._prepared[key] = found
        return found

    def _prepare(
        self, op: ReduceOp, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> tuple[Signature, Reduction] | None:
        name = parse_op(op, dtype)
        kind = signature("all_reduce", name, None, dtype, shape, "cpu")
        word = kind.word if self.config.check else 0
        transport = self._connection.transport("cpu", "auto")
        found = transport.prepare_all_reduce(name, dtype, math.prod(shape), word)
        return None if found is None else (kind, found)

    def run(
        self,
        kind: Signature,
        body: Callable[[], object],
        *,
        meets: bool = False,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        place: Place | None = None,
    ) -> Handle | None:
        """Make one collective call. Every rank must, with an equal `kind`.

        Args:
            kind: what must agree.
            body: moves the data, by way of one of this group's transports.
            meets: whether `body` passes the gate itself (`Transport.meets`).
            async_op: return at once, with a handle.
            timeout: seconds; None takes the configured one.
            place: where the user called from, if not from this thread.

        Raises:
            CollectiveMismatch: the ranks made different calls. No data was touched,
                and the group is as usable as before.
            CollectiveTimeout: some ranks did not come in time.
            CollectiveAborted: the call was released.
        """
        gpu = self._connection.gpu
        if gpu is not None and kind.device == "cuda":
            with torch.cuda.device(gpu):  # its streams are the ones that count
                return self._start(kind, body, meets, async_op, timeout, place)
        return self._start(kind, body, meets, async_op, timeout, place)

    def _start(
        self,
        kind: Signature,
        body: Callable[[], object],
        meets: bool,
        async_op: bool,
        timeout: float | timedelta | None,
        place: Place | None,
    ) -> Handle | None:
        call = Call(kind, timeout)
        call.place = place
        if async_op or (self._worker.busy and not self._worker.is_current):
            call.place = place or find_place(sys._getframe())
            handle = Handle(kind.operation, self.abort)
            if kind.device == "cuda":
                body = on_side_stream(body, self._check)
            self._worker.submit(partial(self._run, call, body, meets), handle)
            if async_op:
                return handle
            handle.wait()
            return None
        self._run(call, body, meets)
        return None

    def _run(self, call: Call, body: Callable[[], object], meets: bool) -> None:
        with self._turn:
            self._begin(call)
            try:
                if not meets:
                    self._meet()
                body()
            except CollectiveMismatch:
                raise
            except BaseException as error:  # noqa: BLE001 - the others must learn of it
                raise self._leave(call, error) from error.__cause__
            finally:
                self._end()

    def _begin(self, call: Call) -> None:
        if self._error is not None:
            self.raise_if_aborted()
        self.sequence = call.sequence = self.sequence + 1
        timeout = self.config.timeout_s if call.timeout is None else call.timeout
        if timeout is None:
            self._deadline = math.inf
        else:
            self._deadline = time.monotonic() + seconds(timeout)
        self._call = call

    def _end(self) -> None:
        self._call = None
        self._deadline = math.inf
        if self._noted:
            self._noted = False
            self._connection.gate.leave_note("")

    def _leave(self, call: Call, error: BaseException) -> BaseException:
        """The error to raise for a call that ended halfway. The group is spent."""
        if isinstance(error, _OutOfTime):
            error = CollectiveTimeout(self._explain_timeout(call))
        elif isinstance(error, MPI.Exception):
            cause = error
            error = CollectiveAborted(f"{call.label} failed in MPI: {cause}")
            error.__cause__ = cause
        if self._error is None:
            self._error = error
        self._connection.gate.leave(f"{type(error).__name__}: {error}")
        return error

    # -- meeting -------------------------------------------------------------------

    def _meet(self) -> None:
        """Wait for all ranks; raise on all of them when their calls differ."""
        call = self._call
        assert call is not None
        word = call.kind.word if self.config.check else 0
        if not self._connection.gate.arrive(word, self._check):
            self._differ()

    def _differ(self) -> NoReturn:
        call = self._call
        assert call is not None
        record = pickle.dumps(call.record(self.ranks[self.rank]))
        records = self._connection.gate.exchange(record, self._check)
        table = describe_mismatch([pickle.loads(each) for each in records])
        raise CollectiveMismatch(table)

    def _check(self) -> None:
        if self._error is not None:
            self.raise_if_aborted()
        if time.monotonic() > self._deadline:
            raise _OutOfTime

    def _explain_timeout(self, call: Call) -> str:
        gate = self._connection.gate
        notes = dict(zip(self.ranks, gate.notes(), strict=False))
        missing = [self.ranks[peer] for peer in gate.missing()]
        record = call.record(self.ranks[self.rank])
        return describe_timeout(record, self.ranks, missing, notes)

    def leave_note(self, note: str) -> None:
        """Let the other members read where this rank is, should they miss it."""
        self._noted = True
        self._connection.gate.leave_note(note)

    # -- life ----------------------------------------------------------------------

    def abort(self, error: BaseException) -> None:
        """Release this rank from whatever call of this group it is blocked in.

        May be called from any thread. The blocked call raises `error`, and so does
        every later one. Other ranks are not told.
        """
        if self._error is None:
            self._error = error
        self._connection.abort()

    @property
    def spent(self) -> bool:
        """Whether a call was left halfway: later calls raise until `renew`."""
        return self._error is not None

    def renew(self, generation: int) -> None:
        """Make a spent group usable again. Every member must call, in no other call.

        What was under way on it is given up, on all members.
        """
        self.abort(CollectiveAborted("the ranks of this group meet anew"))
        self._worker.drain()
        with self._turn:  # another thread's call has ended too
            self._connection.discard()
            self.generation = generation
            self.sequence = 0
            self._error = None
            self._connect()

    def raise_if_aborted(self) -> None:
        """Raise what ended this group, if anything has."""
        error = self._error
        if error is not None:
            raise error.with_traceback(None)

    def new(self, ranks: Sequence[int]) -> Group | None:
        """A group of some of the members. Every member of this group must call.

        Args:
            ranks: positions in this group, 0 to size-1, in the new group's order; the
                same on all ranks.

        Returns:
            The new group; None on ranks that are not in it.
        """
        chosen = tuple(ranks)
        if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(self.size)):
            raise UsageError(
                f"ranks {chosen}: expected different ranks from 0 to {self.size - 1}"
            )
        self.run(signature("new_group", None, None, None, chosen, "none"), _nothing)
        if self.rank not in chosen:
            return None
        return self.among(chosen, tag=self.sequence % 32768)

    def among(self, positions: Sequence[int], tag: int = 0) -> Group:
        """A group of some members. Only they call, and once all of them have come.

        MPI makes the communicator in one blocking call, which nothing can release.
        """
        members = self.comm.group.Incl(positions)
        comm = self.comm.Create_group(members, tag=tag)
        members.Free()
        return Group(
            comm,
            generation=self.generation,
            config=self.config,
            ranks=[self.ranks[position] for position in positions],
        )

    @property
    def hosts(self) -> tuple[int, ...]:
        """The number of each member's host; hosts count in the members' order."""
        return self._connection.hosts

    def describe(self) -> str:
        """The transports in words, such as "shared memory (CPU)"."""
        return self._connection.describe()

    def drain(self) -> None:
        """Wait until all asynchronous calls have ended, well or not."""
        self._worker.drain()

    def finish(self) -> None:
        """Wait for what calls that went well have queued on this rank's GPU."""
        end = time.monotonic() + _FINISH_WITHIN_S

        def check() -> None:
            if self.spent or time.monotonic() > end:
                raise _OutOfTime

        with contextlib.suppress(_OutOfTime):
            self._connection.finish(check)

    def close(self) -> None:
        """Give back what the group holds. Safe to call twice; calls after it raise."""
        self.finish()
        self.abort(CollectiveAborted("this group of ranks was closed"))
        self._worker.stop()
        self._connection.close()
        _live.discard(self)

    @property
    def call(self) -> CollectiveCall | None:
        """The call this process is in on this group, as any thread may ask."""
        own = self.ranks[self.rank]
        call, awaited = self._call, self._awaited
        if call is not None:
            return replace(call.record(own), members=self.ranks)
        if awaited is None:
            return None
        record = awaited.record(own)
        if record.root is None:  # from any rank: only all of them can be missed
            return record
        peer = self.ranks[record.root]
        return replace(record, root=peer, members=(own, peer))

    def _wait_for(self, message: Message | None) -> None:
        self._awaited = None if message is None else Call(message.kind)


def _leave_notes() -> None:
    """Tell every group of this process where it waits: another may be missing it."""
    call = current_call()
    for group in list(_live):
        if group.size > 1:
            group.leave_note(str(call or ""))


def _nothing() -> None:
    pass


def _waited_in() -> list[Group | Waiter]:
    return [*list(_live), *list(waiters)]


def current_call() -> CollectiveCall | None:
    """The collective this process is in right now, on any group; None when in none."""
    return next((call for each in _waited_in() if (call := each.call)), None)


def calls_made() -> int:
    """Collectives and messages begun by this process, on all its groups."""
    return sum(group.sequence + group.mailbox.sequence for group in list(_live))


def renew_groups(generation: int) -> None:
    """Renew every group of this process. All ranks of the world must call.

    Groups are made by calls that all their members make in the same order, so the order
    in which they were made is one that all members can renew them in. One that a member
    has closed meanwhile, in a cell that others did not finish, is closed on all.
    """
    for waiter in list(waiters):
        waiter.close()
    groups = sorted(_live, key=lambda group: group._number)
    held = default_group().comm.allgather({group.identity for group in groups})
    for group in groups:
        gone = [rank for rank in group.ranks if group.identity not in held[rank]]
        if gone:
            reason = f"rank {format_ranks(gone)} has ended this group of ranks"
            group._error = CollectiveAborted(f"{reason}: make it anew, on all of them")
            group._connection.discard()
            group.close()
        else:
            group.renew(generation)


def close_groups() -> None:
    """Close every group of this process: its ranks are to meet in new ones."""
    for waiter in list(waiters):
        waiter.close()
    for group in list(_live):
        group.finish()
        group._connection.discard()  # to free in good order takes all its ranks
        group.close()
    set_default_group(None)


def any_spent() -> bool:
    """Whether a group of this process waits to be renewed."""
    return any(each.spent for each in _waited_in())


def release_calls(error: BaseException) -> None:
    """Abort every group in which this process is in a call. Any thread may call."""
    for each in _waited_in():
        if each.call is not None:
            each.abort(error)


def release_calls_with(ranks: Iterable[int], reason: str) -> None:
    """Abort every group with one of these world ranks in it. Any thread may call.

    They will not come, neither to the call that waits for them nor to a later one.
    """
    gone = set(ranks)
    for waiter in list(waiters):
        waiter.lose(gone, reason)
    for group in list(_live):
        if gone.intersection(group.ranks):
            call = group.call
            what = f"released from {call.operation}: " if call is not None else ""
            group.abort(CollectiveAborted(what + reason))


def set_default_group(group: Group | None) -> None:
    """Set the group that collectives use when they are not given one."""
    global _default
    _default = group


def default_group() -> Group:
    """The group that collectives use when they are not given one.

    Raises:
        WrongProcess: there is none, as in the notebook kernel.
    """
    if _default is None:
        raise WrongProcess(
            "there are no ranks here: call this on a rank, in a %%distributed cell"
        )
    return _default


def _refuse_in_child() -> None:
    """A child that a rank forks has the memory of its groups, and is none of them."""
    for group in list(_live):
        group._error = WrongProcess(
            f"this process is a child that rank {group.ranks[group.rank]} has forked, "
            "and no rank itself: call collectives in the cell, or in the main process"
        )
        group._worker = Worker("none")  # threads stay with the parent


os.register_at_fork(after_in_child=_refuse_in_child)
