"""A group of ranks: one communicator, its transports, and the running call."""

from __future__ import annotations

import contextlib
import math
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView as BelowAutograd

from nbdist.collectives.call import Call, describe_mismatch, describe_timeout
from nbdist.collectives.call_site import CallSite, find_call_site
from nbdist.collectives.call_timing import gpu_timer
from nbdist.collectives.flight_recorder import CallLog, open_log
from nbdist.collectives.handle import Handle
from nbdist.collectives.mailbox import Mailbox, MailHooks, Message
from nbdist.collectives.reduction import ReduceOp
from nbdist.collectives.registry import leave_notes, live
from nbdist.collectives.signature import Signature, signature
from nbdist.collectives.sync import timeout_clock
from nbdist.collectives.sync.device_work import for_any_thread
from nbdist.collectives.sync.shared_barrier import SharedBarrier
from nbdist.collectives.sync.wait import Check, Hooks, seconds, wait_until
from nbdist.collectives.transports.base import Transport
from nbdist.collectives.transports.native import QuickCalls
from nbdist.collectives.transports.select import Connection, connect
from nbdist.collectives.worker import Worker
from nbdist.config import CollectiveConfig
from nbdist.errors import (
    CollectiveAborted,
    CollectiveMismatch,
    CollectiveTimeout,
    UsageError,
    WrongProcess,
)
from nbdist.ipc.flight_record import group_identity
from nbdist.wire import CollectiveCall, Tally

__all__ = ["Group", "Plan"]

_numbering = threading.Lock()
_last_number = 0
"""The largest number of a group of this process."""
_ALL_REDUCE = signature("all_reduce", None, None, None, (), "cpu")
_NUMBER = "number"
_FINISH_WITHIN_S = 10.0
"""A device that takes longer waits for a rank that makes no call."""


def _new_number(above: int = 0) -> int:
    """The next number for a group of this process, which is above the numbers of all
    earlier ones, and above `above`."""
    global _last_number
    with _numbering:
        _last_number = max(_last_number, above) + 1
        return _last_number


class _OutOfTime(Exception):
    """The time-out of the running call has passed."""


class Renewed(CollectiveAborted):
    """The group was renewed while a call was under way."""


class Plan(NamedTuple):
    """A checked call on tensors of one dtype, shape and kind of device."""

    kind: Signature
    """The call's signature, which must be equal on all ranks."""
    transport: Transport
    """Moves the data."""


class Group:
    """The ranks of one MPI communicator, for collectives among them.

    All its ranks must make the group, and make the same calls on it in the same order.
    An abort, a time-out or an interrupt during a call breaks the group, because the
    ranks may then disagree on which messages were sent. Every call on a broken group
    raises, until `renew`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        generation: int = 0,
        config: CollectiveConfig | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Connect to the other ranks. Every rank of `comm` must call.

        Args:
            comm: an intracommunicator. The group uses a duplicate.
            generation: the number of changes of the world's members so far.
            config: the configuration. Default: `CollectiveConfig.from_environment()`.
            ranks: the members' world ranks. Default: 0 to size-1.
        """
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.generation = generation
        self.ranks = tuple(range(comm.size) if ranks is None else ranks)
        self.config = config or CollectiveConfig.from_environment()
        self._error: BaseException | None = None
        self._deadline = math.inf
        self._call: Call | None = None
        self._awaited: Call | None = None
        self._noted = False
        self._turn = threading.Lock()
        self._counting = threading.Lock()
        self.submitted: Callable[[], int] | None = None
        """The calls of this rank so far, as in `Tally.calls`, if another object than
        the user makes the calls on this group, in its own time."""
        self.renewal = ""
        """What the last renewal did to the calls under way, as "cancelled, ..."."""
        self.counters: dict[str, int] = {}
        """Numbers that each member counts on its own, and that must be equal on all.
        After a renewal they are the largest of any member."""
        self._worker = Worker(f"nbdist collectives of {self.ranks}")
        self.number = _new_number()
        """The number of this group, equal on all members. The groups of a process are
        numbered in the order in which they were made."""
        self._connect()
        live.add(self)

    def _connect(self) -> None:
        self._hooks = Hooks(
            self._pass_barrier, self._raise_mismatch, self._check, self._on_late
        )
        self._connection: Connection = connect(self.comm, self.config, self._hooks)
        counts = self._connection.largest({**self.counters, _NUMBER: self.number})
        self.number = counts.pop(_NUMBER)
        _new_number(above=self.number)
        self.identity = group_identity(self.number, self.ranks[0])
        """Equal on all members, and different for every open group."""
        self.counters = counts
        self.key = f"{self.identity}/{self.generation}"
        """Equal on all members, and different for every group and renewal."""
        self._scheduled = 0
        """The asynchronous calls that have not started."""
        self._log = self._new_log()
        reductions = self._connection.reductions
        self.quick = None if reductions is None else reductions.quick_calls(self._log)
        """Makes all-reduces in C; None without the compiled module."""
        self._message_counts: Counter[tuple[str, int | None]] = Counter()
        mail_hooks = MailHooks(
            self.raise_if_aborted,
            self._wait_for,
            self.abort,
            self._begin_message,
            self._end_message,
        )
        self.mailbox = Mailbox(self._connection.mail, mail_hooks)
        """Point-to-point messages among the members."""

    def _new_log(self) -> CallLog:
        rank = self.ranks[self.rank]
        return open_log(self.identity, self.generation, rank, self.ranks)

    # -- what a collective needs ---------------------------------------------------

    def transport(
        self, device: torch.device | str, algorithm: str = "auto"
    ) -> Transport:
        """The transport for tensors on a device, or on a kind of device.

        Every member must make the first call for a GPU. Later calls of this rank must
        use the same GPU.

        Raises:
            UsageError: The algorithm is not available for this device, or a CUDA graph
                cannot capture the call.
        """
        kind = device if isinstance(device, str) else device.type
        is_captured = kind == "cuda" and torch.cuda.is_current_stream_capturing()
        if kind not in self._connection.transports:
            if is_captured and self.size > 1:
                raise UsageError(
                    "the first collective of a group on GPUs connects the ranks, which "
                    "a CUDA graph cannot capture: make one before the capture"
                )
            if kind == "cuda":
                self._add_gpu(torch.device(device))
            else:
                self._connection.add_device(kind)
        if kind == "cuda":
            self._check_gpu(torch.device(device))
        found = self._connection.transport(kind, algorithm)
        if is_captured and not found.is_capturable:
            raise UsageError(
                f"a CUDA graph cannot capture a collective over {found.description}, "
                "in which the host takes part: capture the work before and after it. "
                "With a GPU for each rank it goes over NCCL, which can be captured"
            )
        return found

    def plan(
        self,
        operation: str,
        tensor: Tensor,
        op: str | None = None,
        root: int | None = None,
        algorithm: str = "auto",
    ) -> Plan:
        """The signature and the transport of a call.

        Args:
            operation: The operation's name.
            tensor: A tensor that `resolve` has accepted.
            op: The reduce-op, which must agree on all ranks; None for an operation
                without one.
            root: The world rank that sends to all or receives from all; None for an
                operation without one.
            algorithm: As for `transport`.

        Raises:
            UsageError: See `transport`.
        """
        transport = self.transport(tensor.device, algorithm)
        device = tensor.device.type
        how = op if algorithm == "auto" else f"{op} by {algorithm}"
        kind = signature(operation, how, root, tensor.dtype, tensor.shape, device)
        return Plan(kind, transport)

    def start(
        self,
        plan: Plan,
        body: Callable[[], object],
        async_op: bool,
        timeout: float | timedelta | None,
    ) -> Handle | None:
        """Make the call of a plan. See `run`."""
        has_barrier = plan.transport.has_barrier
        return self.run(
            plan.kind, body, has_barrier=has_barrier, async_op=async_op, timeout=timeout
        )

    def keep_quick(self, tensor: Tensor, op: ReduceOp, kind: Signature) -> None:
        """Let `quick` make all-reduces of this dtype, shape and op from now on.

        Args:
            tensor: The tensor that the call reduces.
            op: The reduce-op as the user gave it.
            kind: The call's signature.
        """
        reductions, name = self._connection.reductions, kind.reduce_op
        if reductions is None or self.quick is None or not tensor.is_cpu:
            return
        assert name is not None  # all_reduce has an op
        length = tensor.numel()
        reduction = reductions.plan("all_reduce", name, tensor.dtype, length)
        if reduction is not None:
            fingerprint = kind.fingerprint if self.config.check else 0
            self.quick.keep(op, tensor.shape, reduction, fingerprint, kind.text)

    def finish_quick(
        self, kind: Signature, timeout: float | timedelta | None = None
    ) -> None:
        """Wait for the end of a call of `quick` in which a rank is late.

        Args:
            kind, timeout: As for `run`.

        Raises:
            CollectiveMismatch, CollectiveTimeout, CollectiveAborted: As for `run`.
        """
        assert self.quick is not None
        call = Call(kind, timeout)
        call.sequence, call.ticket = self.sequence, self.quick.ticket
        self._run_body(call, self._await_quick)

    def _await_quick(self) -> None:
        quick, barrier = self.quick, self._connection.barrier
        assert quick is not None
        assert isinstance(barrier, SharedBarrier)
        try:
            if not barrier.wait(self._check, quick.resume):
                self._raise_mismatch()
        finally:
            quick.release()

    def break_quick(self, error: BaseException) -> None:
        """Break the group if `error` has interrupted a call of `quick`."""
        if self.quick is not None and self.quick.waiting is not None:
            self._log.end(self.quick.ticket, False)
            self._break(Call(_ALL_REDUCE), error)

    def _check_gpu(self, device: torch.device) -> None:
        gpu = self._connection.gpu
        if gpu is not None and device.index not in (None, gpu.index):
            raise UsageError(
                f"a tensor on {device}: expected one on {gpu}, which this rank's "
                "earlier calls on this group used"
            )

    def _add_gpu(self, device: torch.device) -> None:
        kind = signature("first_on_gpu", None, None, None, (), device.type)
        with torch.cuda.device(device):
            self.run(kind, self._connection.add_gpu)

    def run(
        self,
        kind: Signature,
        body: Callable[[], object],
        *,
        has_barrier: bool = False,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        call_site: CallSite | None = None,
    ) -> Handle | None:
        """Make one collective call. Every rank must call, with an equal `kind`.

        Args:
            kind: the signature, which must agree between the ranks.
            body: moves the data by a transport of this group.
            has_barrier: whether `body` passes the barrier (`Transport.has_barrier`).
            async_op: return a handle at once.
            timeout: seconds to wait for the other ranks. Default: `config.timeout_s`.
            call_site: the line of the user's call, if it was made in another thread.

        Raises:
            CollectiveMismatch: The ranks made different calls. No data has changed,
                and the group is not broken.
            CollectiveTimeout: A rank did not make the call in time.
            CollectiveAborted: The call was released, for instance because a rank died.
        """
        call = Call(kind, timeout, call_site)
        if async_op or self._worker.last is not None:
            return self._queue(call, body, has_barrier, async_op)
        if self._connection.gpu is not None and kind.device == "cuda":
            with torch.cuda.device(self._connection.gpu):
                self._run(call, body, has_barrier)
        else:
            self._run(call, body, has_barrier)
        return None

    def _queue(
        self, call: Call, body: Callable[[], object], has_barrier: bool, async_op: bool
    ) -> Handle | None:
        """Run a call after the asynchronous calls that were started before it."""
        gpu = self._connection.gpu if call.kind.device == "cuda" else None
        # The streams are those of the group's GPU, whichever device is current.
        current = torch.cuda.device(gpu) if gpu is not None else _nowhere
        with current:
            if not async_op and (self._worker.is_current or not self._worker.busy):
                self._run(call, body, has_barrier)
                return None
            if self._error is None:  # otherwise it never starts
                call.ticket = self._log.schedule(call.kind.text, call.kind.fingerprint)
                with self._counting:
                    self._scheduled += 1
            self._locate(call)
            handle = Handle(call.where, self.abort)
            body = for_any_thread(body, call.kind.device, self._check)
            if self.quick is not None:
                self._hold(self.quick)
                handle.add_done_callback(partial(_release, self.quick))
            job = partial(self._run_on, gpu, call, body, has_barrier)
            self._worker.submit(job, handle)
            if async_op:
                return handle
            handle.wait()
        return None

    def _run_on(
        self,
        gpu: torch.device | None,
        call: Call,
        body: Callable[[], object],
        has_barrier: bool,
    ) -> None:
        """Run a call in the worker's thread, whose current device CUDA chose."""
        with torch.cuda.device(gpu) if gpu is not None else _nowhere:
            self._run(call, body, has_barrier)

    def _run(self, call: Call, body: Callable[[], object], has_barrier: bool) -> None:
        with self._turn:
            quick = self.quick
            if quick is not None:
                self._hold(quick)
            ok = False
            try:
                if self._error is not None:
                    self.raise_if_aborted()
                if call.ticket:
                    with self._counting:
                        self._log.start(call.ticket)
                        self._scheduled -= 1
                else:
                    call.ticket = self._log.begin(call.kind.text, call.kind.fingerprint)
                call.sequence = self.sequence
                self._run_body(call, body, has_barrier)
                ok = True
            except Renewed as renewed:
                raise CollectiveAborted(f"{call.where} was {renewed}") from None
            finally:
                self._log.end(call.ticket, ok)
                if quick is not None:
                    quick.release()

    def _locate(self, call: Call) -> None:
        """Find the call site in this thread's stack, and record it."""
        site = call.call_site = call.call_site or find_call_site(sys._getframe())
        self._log.locate(call.ticket, site.cell or 0, site.line or 0)

    def _on_late(self) -> None:
        """Record where the current call was made, because it waits for a rank."""
        call = self._call
        if call is not None:
            self._locate(call)
        leave_notes()

    def _hold(self, quick: QuickCalls) -> None:
        if not quick.hold():  # another thread is in a quick call
            wait_until(quick.hold, self.raise_if_aborted)

    def _run_body(
        self, call: Call, body: Callable[[], object], has_barrier: bool = True
    ) -> None:
        """Run `body` as this rank's current call, which other threads can see."""
        timeout = self.config.timeout_s if call.timeout is None else call.timeout
        if timeout is not None:
            self._deadline = timeout_clock.now() + seconds(timeout)
        self._hooks.fingerprint = call.kind.fingerprint if self.config.check else 0
        self._call = call
        try:
            if not has_barrier:
                self._pass_barrier()
            # The result is no part of an autograd graph. It may be a view, a leaf or an
            # inference tensor.
            with BelowAutograd():
                if call.kind.device == "cuda":
                    with gpu_timer.timing(call.kind, self.size):
                        body()
                else:
                    body()
        except CollectiveMismatch:
            raise
        except BaseException as error:  # noqa: BLE001 - the other ranks must get it
            raise self._break(call, error) from error.__cause__
        finally:
            self._call = None
            self._deadline = math.inf
            if self._noted:
                self._noted = False
                self._connection.barrier.leave_note("")

    def _break(self, call: Call, error: BaseException) -> BaseException:
        """Break the group after an error in a call. Returns the error to raise."""
        if isinstance(error, _OutOfTime):
            error = CollectiveTimeout(self._explain_timeout(call))
        elif isinstance(error, MPI.Exception):
            cause = error
            error = CollectiveAborted(f"{call.label} failed in MPI: {cause}")
            error.__cause__ = cause
        elif isinstance(error, dist.DistBackendError) and self._error is not None:
            error = self._error  # the abort has ended NCCL's call
        if self._error is None:
            self._error = error
        self._connection.barrier.leave(f"{type(error).__name__}: {error}")
        return error

    # -- the barrier ---------------------------------------------------------------

    def _pass_barrier(self) -> None:
        """Wait for all ranks. Raise on all of them if their calls differ."""
        if not self._connection.barrier.arrive(self._hooks.fingerprint, self._check):
            self._raise_mismatch()
        if self._call is not None:
            self._call.has_met = True

    def _raise_mismatch(self) -> NoReturn:
        call = self._call
        assert call is not None
        self._locate(call)
        record = pickle.dumps(call.record(self.ranks[self.rank]))
        records = self._connection.barrier.exchange(record, self._check)
        table = describe_mismatch([pickle.loads(each) for each in records])
        raise CollectiveMismatch(table)

    def _check(self) -> None:
        if self._error is not None:
            self.raise_if_aborted()
        if timeout_clock.now() > self._deadline:
            raise _OutOfTime

    def _explain_timeout(self, call: Call) -> str:
        barrier = self._connection.barrier
        notes = dict(zip(self.ranks, barrier.notes(), strict=False))
        missing = [self.ranks[peer] for peer in barrier.missing()]
        record = call.record(self.ranks[self.rank])
        return describe_timeout(record, self.ranks, missing, notes)

    def leave_note(self, note: str) -> None:
        """Set this rank's note, which the errors of waiting members show."""
        self._noted = True
        self._connection.barrier.leave_note(note)

    # -- life ----------------------------------------------------------------------

    def abort(self, error: BaseException) -> None:
        """Release this rank from the call of this group that it is blocked in.

        Any thread may call. The blocked call and every later call raise `error`. The
        other ranks are not released.
        """
        if self._error is None:
            self._error = error
        self._connection.abort()

    @property
    def broken(self) -> bool:
        """Whether the group is broken: every call raises until `renew`."""
        return self._error is not None

    def renew(self, generation: int, why: str = "") -> None:
        """Make a broken group usable again. Every member must call.

        Calls and messages under way end with an error on all members.

        Args:
            generation: Of the world.
            why: The reason, for that error.
        """
        text = f"cancelled, because {why or 'its group of ranks was renewed'}"
        self.renewal = text
        self.abort(Renewed(text))
        self._worker.drain()
        with self._turn:  # another thread's call has ended too
            self.mailbox.cancel(f"was {text}")
            self._connection.discard()
            self.generation = generation
            self._error = None
            self._connect()

    def raise_if_aborted(self) -> None:
        """Raise the error that broke this group, if it is broken."""
        error = self._error
        if error is not None:
            raise error.with_traceback(None)

    def new(self, ranks: Sequence[int]) -> Group | None:
        """Make a group of some members. Every member of this group must call.

        Args:
            ranks: positions in this group, 0 to size-1, in the new group's order.
                Equal on all ranks.

        Returns:
            The new group; None on ranks outside it.
        """
        chosen = tuple(ranks)
        if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(self.size)):
            raise UsageError(
                f"ranks {chosen}: expected ranks from 0 to {self.size - 1}, each once"
            )
        self.run(signature("new_group", None, None, None, chosen, "none"), _nothing)
        if self.rank not in chosen:
            return None
        return self.among(chosen, tag=self.sequence % 32768)

    def among(self, positions: Sequence[int], tag: int = 0) -> Group:
        """Make a group of some members. Only they call, after a rendezvous.

        MPI makes the communicator in a blocking call that cannot be released.
        """
        members = self.comm.group.Incl(positions)
        comm = self.comm.Create_group(members, tag=tag)
        members.Free()
        return self._over(comm, positions)

    def among_living(self, positions: Sequence[int], key: str) -> Group:
        """`among`, also if other members of this group have died.

        Args:
            positions: as for `among`.
            key: identifies the new group, at most 1000 characters.
        """
        # Every function that takes this communicator fails once a member has died.
        members = self.comm.group.Incl(positions)
        nothing, returned = MPI.INFO_NULL, MPI.ERRORS_RETURN
        comm = MPI.Intracomm.Create_from_group(members, key, nothing, returned)
        members.Free()
        return self._over(comm, positions)

    def _over(self, comm: MPI.Intracomm, positions: Sequence[int]) -> Group:
        return Group(
            comm,
            generation=self.generation,
            config=self.config,
            ranks=[self.ranks[position] for position in positions],
        )

    @property
    def sequence(self) -> int:
        """The number of collectives started since the group was made or renewed."""
        return self._log.sequence

    @property
    def mark(self) -> tuple[int, int, int]:
        """What has begun. Equal marks have equal tallies. Any thread may read it."""
        if self.submitted is not None:
            calls = self.submitted()
        elif self._worker.last is None:
            calls = self._log.sequence
        else:
            with self._counting:
                calls = self._log.sequence + self._scheduled
        mailbox = self.mailbox
        return calls, mailbox.sequence, mailbox.traffic.from_any()

    @property
    def tally(self) -> Tally:
        """What this rank has begun since the group was made or renewed."""
        calls, _, from_any = self.mark
        traffic = self.mailbox.traffic
        sent, received = (
            [(self.ranks[peer], number) for peer, number in list(each.items())]
            for each in (traffic.sent, traffic.received)
        )
        return Tally(self.ranks, calls, sent, received, from_any)

    def settle(self, until: float) -> None:
        """Wait until the asynchronous calls have ended, until a monotonic time."""
        last = self._worker.last
        if last is not None:
            last.await_end(until)

    @property
    def gpu(self) -> torch.device | None:
        """The GPU of this rank's calls; None before the first call for a GPU."""
        return self._connection.gpu

    @property
    def hosts(self) -> tuple[int, ...]:
        """For each member, the number of its host. Hosts are numbered from 0."""
        return self._connection.hosts

    def describe(self) -> str:
        """The transports in words, such as "shared memory (CPU)"."""
        return self._connection.describe()

    def drain(self) -> None:
        """Wait until all asynchronous calls have ended, with success or an error."""
        self._worker.drain()

    def finish(self) -> None:
        """Wait for the work that finished calls have queued on this rank's GPU."""
        with contextlib.suppress(_OutOfTime):
            self._connection.finish(self._finish_check())

    def _finish_check(self) -> Check:
        end = time.monotonic() + _FINISH_WITHIN_S

        def check() -> None:
            if self.broken or time.monotonic() > end:
                raise _OutOfTime

        return check

    def close(self) -> None:
        """Free the group's resources. Later calls raise. Safe to call twice.

        Every member must call. With NCCL this rank waits until the work of all members
        is done, but not for a member that does not call within 10 s.
        """
        self.finish()
        self._end_together()
        self.abort(CollectiveAborted("this group of ranks was closed"))
        assert self._error is not None  # this one, or that of an earlier abort
        self._worker.stop(self._error)
        self._connection.close()
        live.discard(self)

    def _end_together(self) -> None:
        """Close the transports that all members must close together, if all come."""
        if self.broken or self._worker.busy or not self._turn.acquire(blocking=False):
            return  # a call is running, and is aborted
        try:
            self._connection.end_together(self._finish_check())
        except (_OutOfTime, CollectiveAborted, MPI.Exception):
            self._connection.barrier.leave("it was closed")
        finally:
            self._turn.release()

    def give_up(self, error: BaseException) -> None:
        """Close the group without its other members. Later calls raise `error`."""
        self.finish()
        self._error = error
        self._connection.discard()  # freeing a communicator takes all members
        self.close()

    def disown(self) -> None:
        """Make every call raise: this process is a forked child of a member."""
        self._error = WrongProcess(
            f"this process is a forked child of rank {self.ranks[self.rank]}, not a "
            "rank: call collectives in the cell, or in the main process"
        )
        self._worker = Worker("none")  # threads stay with the parent
        self._log = self._new_log()  # the record is the parent's
        self.quick = None

    @property
    def call(self) -> CollectiveCall | None:
        """This process's current call on this group, if any. Any thread may read it."""
        own = self.ranks[self.rank]
        call, awaited = self._call, self._awaited
        if call is not None:
            has_met = call.has_met or self._connection.barrier.has_met()
            return replace(call.record(own), members=self.ranks, has_met=has_met)
        if awaited is None:
            return None
        record = awaited.record(own)
        if record.root is None:  # a message from any rank
            return record
        peer = self.ranks[record.root]
        return replace(record, root=peer, members=(own, peer))

    def _begin_message(self, kind: Signature) -> int:
        """Record a message. Returns its ticket."""
        self._message_counts[kind.operation, kind.root] += 1
        count = self._message_counts[kind.operation, kind.root]
        return self._log.message(kind.text, kind.fingerprint, count)

    def _end_message(self, ticket: int, ok: bool) -> None:
        self._log.end(ticket, ok)

    def _wait_for(self, message: Message | None) -> None:
        self._awaited = None if message is None else Call(message.kind)


_nowhere = contextlib.nullcontext()


def _release(quick: QuickCalls, _: Handle) -> None:
    quick.release()


def _nothing() -> None:
    pass
