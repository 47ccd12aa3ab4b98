"""The backend "nbdist" of torch.distributed, built on `nbdist.collectives`.

`registration.register` makes it known to torch. With "cpu:nbdist,cuda:nccl", NCCL does
the operations on GPU tensors.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle
from nbdist.collectives.mailbox import Message
from nbdist.collectives.ops.all_gather import all_gather, all_gather_into_tensor
from nbdist.collectives.ops.all_reduce import all_reduce
from nbdist.collectives.ops.all_to_all import all_to_all, all_to_all_single
from nbdist.collectives.ops.barrier import barrier
from nbdist.collectives.ops.broadcast import broadcast
from nbdist.collectives.ops.gather import gather
from nbdist.collectives.ops.point_to_point import irecv, isend
from nbdist.collectives.ops.premul_sum import (
    premul_sum_all_reduce,
    premul_sum_reduce,
    premul_sum_reduce_scatter,
    premul_sum_reduce_scatter_tensor,
)
from nbdist.collectives.ops.reduce import reduce
from nbdist.collectives.ops.reduce_scatter import reduce_scatter, reduce_scatter_tensor
from nbdist.collectives.ops.scatter import scatter
from nbdist.collectives.ops.sparse_all_reduce import sparse_all_reduce
from nbdist.collectives.ops.validation import split_evenly
from nbdist.collectives.reduction import c10d_name
from nbdist.collectives.torch_backend.dispatcher import (
    OPERATORS,
    observed,
    through_dispatcher,
)
from nbdist.collectives.torch_backend.native_calls import NativeCalls
from nbdist.collectives.torch_backend.nccl_links import Links, connect_first, links_of
from nbdist.collectives.torch_backend.reconfigure import Reconfiguration, handle
from nbdist.collectives.torch_backend.work import (
    CollectiveWork,
    MessageWork,
    WorkList,
    in_callback,
    original_error,
)
from nbdist.collectives.transports.nccl import shut_down
from nbdist.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveTimeout,
    UsageError,
)

__all__ = [
    "CollectiveWork",
    "ProcessGroup",
    "nccl_links",
    "nccl_of",
    "original_error",
]

NAME = "nbdist"
_c10d: Any = torch._C._distributed_c10d
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")
_Type = dist.ProcessGroup.BackendType
_Operation = Callable[..., dist.Work]
_Call = Callable[..., Handle | None]


def _by_device(operation: _Operation) -> _Operation:
    """Delegate CUDA tensors to NCCL if it is the group's backend for CUDA."""

    name = operation.__name__
    is_collective = name not in _MESSAGES

    @functools.wraps(operation)
    def chosen(self: ProcessGroup, tensors: Any, *args: Any, **keywords: Any) -> Any:
        native: Any = self._native(tensors, *args[:1])
        if native is not None:
            self.members.raise_if_aborted()
            work = getattr(native, name)(tensors, *args, **keywords)
            if is_collective:
                number = native._get_sequence_number_for_group()
                tensor = _first(tensors)
                options = (*args, *keywords.values())
                self.native_calls.note(number, name, tensor, options)
            return work
        if keywords and not _OPTIONS.isdisjoint(keywords):
            args, keywords = _with_options(args, keywords)
        if observed():
            call = functools.partial(operation, self, tensors, *args, **keywords)
            work = through_dispatcher(name, [tensors, *args], call)
            return CollectiveWork(None, []) if work is None else work
        return operation(self, tensors, *args, **keywords)

    return chosen


_MESSAGES = {"send", "recv", "recv_anysource"}
_OPTIONS = {"op", "root", "timeout"}


@dataclass(slots=True)
class _Options:
    """The options that c10d's short forms take as keywords."""

    reduceOp: Any = None
    rootRank: int = 0
    timeout: timedelta | None = None
    asyncOp: bool = True


def _with_options(
    args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace c10d's keywords "op", "root" and "timeout" by an options object."""
    options = _Options(
        keywords.pop("op", None), keywords.pop("root", 0), keywords.pop("timeout", None)
    )
    return (*args, options), keywords


def _refuse(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"nbdist has no {name}: {instead}")

    refuse.__name__ = name.rsplit(".", 1)[-1]
    refuse.__doc__ = f"Raise NotImplementedError: {instead}."
    return refuse


def nccl_of(group: dist.ProcessGroup) -> Any | None:
    """NCCL's part of a process group; None if it has none, or has not used it."""
    # Ours is made by its first use.
    made = vars(group).get("_nccl") if isinstance(group, ProcessGroup) else group
    if made is None:
        return None
    try:
        backend: Any = made._get_backend(_CUDA)
    except RuntimeError:  # a group without CUDA
        return None
    return backend if backend.name() == "nccl" else None


def nccl_links(group: dist.ProcessGroup) -> Links | None:
    """What a process group has connected and called of NCCL; None if it has not."""
    made = vars(group).get("_nccl") if isinstance(group, ProcessGroup) else group
    return None if made is None else links_of(made)


class ProcessGroup(dist.ProcessGroup):
    """A process group of torch.distributed.

    Each operation has the signature of c10d's: lists of one tensor, an options object,
    and ranks numbered within the group. With `asyncOp` an operation returns at once and
    runs in the group's thread, in the order of the calls. Otherwise it returns when the
    result is in place. Every member must call each collective.

    The operations raise the errors of the functions of `nbdist.collectives`.
    """

    def __init__(
        self,
        store: Store,
        members: Group | tuple[int, int],
        timeout: timedelta,
        owned: Group | None = None,
    ) -> None:
        """Make a process group. Every member must call.

        Args:
            store: used by NCCL's ranks for their rendezvous.
            members: the group of the ranks. If `reconfigure` makes it: this rank's
                number and the number of ranks, as `init_process_group` has them.
            timeout: the default time-out of an operation.
            owned: the group that `shutdown` closes, if it belongs to this object.
        """
        self._members = members if isinstance(members, Group) else None
        self._place = (
            (members.rank, members.size) if isinstance(members, Group) else members
        )
        # The only constructor that a Python subclass can use. torch's stubs lack it.
        super().__init__(*self._place)  # type: ignore[call-arg, arg-type]
        self._reconfiguration: Reconfiguration | None = None
        self._uuids: set[int] = set()
        self.epoch = ""
        """The number and the ranks of the last `reconfigure`; "" where there was none.
        No other group of ranks has the same."""
        self._store = store
        self._generation = 0
        """Of NCCL's part. The parts of a group meet under different names."""
        self._timeout = timeout
        self._owned = owned
        self._name = self._description = ""
        self._coalesced: list[dist.Work] | None = None
        self.native_calls = NativeCalls()
        """The collectives that NCCL was given."""
        self._extension = timedelta(0)
        """What the next collective's time-out is longer than `_timeout`."""
        self._backend = _make_backend(self)
        for device in (_CPU, _CUDA) if torch.cuda.is_available() else (_CPU,):
            self._register_backend(device, _Type.CUSTOM, self._backend)
        if self._backend is not None:
            self._set_default_backend(_Type.CUSTOM)

    # -- members -------------------------------------------------------------------

    @property
    def members(self) -> Group:
        """The group of the ranks.

        Raises:
            UsageError: There is none before the first `reconfigure`, and after one that
                has failed.
        """
        if self._members is None:
            raise UsageError(
                "this process group has no members: call its reconfigure with the "
                "handles of the ranks that are to be its members"
            )
        return self._members

    supports_reconfigure = True

    def get_reconfigure_handle(self) -> str:
        """This rank's handle for `reconfigure`. It is valid until the world changes."""
        return handle()

    def reconfigure(self, opts: Any) -> dist.Work:
        """Change the members. Each of the new members must call with equal options.

        The calls of the old members that are under way end with an error on this rank.
        Members that have died need not be left out by the others first: none but the
        new members must be alive.

        Args:
            opts: c10d's `ReconfigureOptions`, or an object with its attributes: `uuid`,
                a number that was not used before; `handles`, those of the new members;
                and optionally `timeout`. A list of handles gives the order of the
                ranks.

        Returns:
            A work that has ended.

        Raises:
            CollectiveError: The uuid was used before.
            CollectiveTimeout: A rank did not call in time.
            CollectiveAborted: A rank has died, or this rank was released.
            UsageError: A handle is not valid, or this rank's is missing.
        """
        if opts.uuid in self._uuids:
            raise CollectiveError(
                f"reconfigure: the uuid {opts.uuid} was already used for this process "
                "group: pass a new number"
            )
        timeout = self._timeout_of(opts)
        reconfiguration = Reconfiguration(opts.uuid, opts.handles, timeout)
        self._uuids.add(opts.uuid)
        self._leave()
        self._reconfiguration = reconfiguration
        try:
            self._members = self._owned = members = reconfiguration()
            self._place = members.rank, members.size
        finally:
            self._reconfiguration = None
        self.epoch = f"{opts.uuid}/{members.ranks}"
        return CollectiveWork(None, [])

    def has(self, members: Group) -> bool:
        """Whether this group's ranks are those of `members`, by the same group."""
        return self._members is members

    def return_to(self, members: Group) -> None:
        """Undo `reconfigure`: the ranks of an open group are the members again.

        Every rank must call, in a new generation. The numbers of `reconfigure` begin
        again.
        """
        if not self.has(members):
            self._leave()
            self._uuids.clear()
            self._members, self._place = members, (members.rank, members.size)
            self.epoch = ""

    def _leave(self) -> None:
        """Leave the members, without a call of theirs."""
        self._abort_nccl()
        owned, self._owned, self._members = self._owned, None, None
        if owned is not None:
            owned.give_up(CollectiveAborted("the process group was reconfigured"))

    def renew_nccl(self, generation: int) -> None:
        """Abort NCCL's part. The next collective of NCCL makes another one.

        Every member must call.

        Args:
            generation: A number that was not used before, equal on all members.
        """
        self._abort_nccl()
        self._generation = generation

    def _abort_nccl(self) -> None:
        nccl = nccl_of(self)
        if nccl is not None:
            nccl.abort()
        vars(self).pop("_nccl", None)
        self.native_calls = NativeCalls()

    def getRank(self) -> int:
        """This rank's number in the group, also while it has no members."""
        return self._place[0]

    def getSize(self) -> int:
        """The number of members that the group has, is to have, or had last."""
        return self._place[1]

    rank, size = getRank, getSize

    # -- reductions ----------------------------------------------------------------

    @_by_device
    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce a tensor over all ranks, in place. It may be a sparse COO tensor."""
        tensor = _one(tensors)
        if tensor.is_sparse:
            return self._sparse_allreduce(tensor, opts)
        call = _reduction(opts, all_reduce, premul_sum_all_reduce, tensor)
        return self._run(call, opts, [tensor])

    @_by_device
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce several tensors over all ranks, in place.

        Tensors may share memory: the result is that of the values before the call.
        """
        apart = _apart(tensors)
        works = WorkList([self.allreduce(tensor, opts) for tensor in apart])
        copies = [
            pair for pair in zip(tensors, apart, strict=True) if pair[0] is not pair[1]
        ]
        if copies:
            works.wait()
            for tensor, copy in copies:
                tensor.copy_(copy)
        return works

    @_by_device
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> dist.Work:
        """Reduce into one rank's tensor, in place.

        Args:
            tensors: a tensor, or a list of one.
            opts: c10d's options, or the root.
            op: the reduce-op, if `opts` is the root.
        """
        if op is not None:
            opts = _Options(op, opts)
        tensor, root = _one(tensors), self._root(opts)
        call = _reduction(opts, reduce, premul_sum_reduce, tensor, root)
        return self._run(call, opts, [tensor])

    @_by_device
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Reduce `inputs[0][r]` of all ranks into rank r's output.

        The tensors of a list may differ in shape.
        """
        output, pieces = _one(outputs), _only_list(inputs)
        if len({piece.shape for piece in pieces}) > 1:
            return self._uneven_reduce_scatter(output, pieces, opts)
        kinds = reduce_scatter, premul_sum_reduce_scatter
        call = _reduction(opts, *kinds, output, pieces)
        return self._run(call, opts, [output])

    @_by_device
    def _reduce_scatter_base(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> dist.Work:
        """Reduce the r-th part of all ranks' inputs into rank r's output."""
        kinds = reduce_scatter_tensor, premul_sum_reduce_scatter_tensor
        call = _reduction(opts, *kinds, output, input)
        return self._run(call, opts, [output])

    @_by_device
    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        """Reduce and scatter several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return WorkList([self._reduce_scatter_base(*pair, opts) for pair in pairs])

    # -- copies --------------------------------------------------------------------

    @_by_device
    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Copy one rank's tensor into the other ranks' tensors."""
        tensor, root = _one(tensors), self._root(opts)
        return self._run(functools.partial(broadcast, tensor, root), opts, [tensor])

    @_by_device
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather all ranks' tensors into a list, on all ranks."""
        parts, tensor = _only_list(outputs), _one(inputs)
        return self._run(functools.partial(all_gather, parts, tensor), opts, parts)

    @_by_device
    def allgather_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        """Gather several tensors; `outputs[r]` are those of rank r."""
        columns = zip(*outputs, strict=True)
        pairs = zip(columns, inputs, strict=True)
        return WorkList(
            [self.allgather([list(column)], [one], opts) for column, one in pairs]
        )

    @_by_device
    def _allgather_base(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> dist.Work:
        """Gather all ranks' tensors into one, on all ranks."""
        call = functools.partial(all_gather_into_tensor, output, input)
        return self._run(call, opts, [output])

    @_by_device
    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        """Gather several tensors, each into one output."""
        pairs = zip(outputs, inputs, strict=True)
        return WorkList([self._allgather_base(*pair, opts) for pair in pairs])

    @_by_device
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Send `inputs[r]` to rank r, and receive rank r's tensor in `outputs[r]`."""
        return self._run(functools.partial(all_to_all, outputs, inputs), opts, outputs)

    @_by_device
    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Any,
        input_sizes: Any,
        opts: Any = None,
    ) -> dist.Work:
        """Send consecutive rows of one tensor to each rank.

        Args:
            output_sizes, input_sizes: rows for each rank; empty for equal parts.
        """
        call = functools.partial(
            all_to_all_single, output, input, output_sizes, input_sizes
        )
        return self._run(call, opts, [output])

    # torch 2.13 has these names for the same operations.
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_to_all_single = alltoall_base

    # -- one rank and the others ---------------------------------------------------

    @_by_device
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather into a list on one rank. `outputs` is empty on the other ranks."""
        parts, tensor = _only_list(outputs) if outputs else None, _one(inputs)
        call = functools.partial(gather, tensor, parts, self._root(opts))
        return self._run(call, opts, parts or [])

    @_by_device
    def gather_into_tensor(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> dist.Work:
        """Gather into one tensor on one rank. Other ranks' `output` is ignored."""
        root, parts = self._root(opts), None
        if self.members.ranks[self.members.rank] == root:
            parts = list(split_evenly("output", output, input, self.members))
        call = functools.partial(gather, input, parts, root)
        return self._run(call, opts, [output])

    gather_single = gather_into_tensor

    @_by_device
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Scatter one rank's tensors. `inputs` is empty on the other ranks."""
        tensor, parts = _one(outputs), _only_list(inputs) if inputs else None
        call = functools.partial(scatter, tensor, parts, self._root(opts))
        return self._run(call, opts, [tensor])

    @_by_device
    def send(self, tensors: Any, target: int, tag: int = 0) -> dist.Work:
        """Start to send a contiguous tensor to one rank."""
        tensor, target = _contiguous(tensors), self._member(target, "peer")
        return self._message(isend(tensor, target, group=self.members, tag=tag))

    @_by_device
    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        """Start to receive from one rank into a contiguous tensor."""
        tensor, source = _contiguous(tensors), self._member(source, "peer")
        return self._message(irecv(tensor, source, group=self.members, tag=tag))

    @_by_device
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Start to receive from any rank into a contiguous tensor."""
        tensor = _contiguous(tensors)
        return self._message(irecv(tensor, group=self.members, tag=tag))

    def barrier(  # type: ignore[override] # torch's stub has an overload for each
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Wait for every member."""
        if timeout is not None:
            opts = _Options(timeout=timeout)
        call = functools.partial(self._run, barrier, opts, [])
        work = through_dispatcher("barrier", [], call) if observed() else call()
        return CollectiveWork(None, []) if work is None else work

    # -- coalescing ----------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cuda" and self._nccl is not None:
            self._nccl._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        if device.type == "cuda" and self._nccl is not None:
            return self._nccl._end_coalescing(device)
        works, self._coalesced = self._coalesced, None
        return WorkList(works or [])

    # -- common to all operations --------------------------------------------------

    def _sparse_allreduce(self, tensor: Tensor, opts: Any) -> dist.Work:
        """All-reduce a sparse COO tensor before returning."""
        op, timeout = getattr(opts, "reduceOp", opts), self._timeout_of(opts)
        sparse_all_reduce(tensor, op or "sum", group=self.members, timeout=timeout)
        return self._collect(CollectiveWork(None, [tensor]))

    def _uneven_reduce_scatter(
        self, output: Tensor, pieces: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        """Reduce each piece into its rank's output, one after the other."""
        if len(pieces) != self.members.size:
            raise UsageError(f"expected {self.members.size} tensors, got {len(pieces)}")
        mine = pieces[self.members.rank]
        if mine.shape != output.shape:
            raise UsageError(
                f"an output of shape {tuple(output.shape)}: expected that of this "
                f"rank's input, {tuple(mine.shape)}"
            )
        works = []
        for root, piece in enumerate(pieces):
            if root == self.members.rank:
                piece = output.copy_(piece)
            target = self.members.ranks[root]
            call = _reduction(opts, reduce, premul_sum_reduce, piece, target)
            works.append(self._run(call, opts, [piece]))
        return WorkList(works)

    def _run(self, call: _Call, opts: Any, result: Sequence[Tensor]) -> dist.Work:
        timeout = self._timeout_of(opts)
        if self._extension:
            timeout, self._extension = timeout + self._extension, timedelta(0)
        handle = call(
            group=self.members,
            async_op=getattr(opts, "asyncOp", True) and not in_callback(),
            timeout=timeout,
        )
        return self._collect(CollectiveWork(handle, result))

    def _message(self, message: Message) -> dist.Work:
        return self._collect(MessageWork(message, self._timeout))

    def _collect(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _timeout_of(self, opts: Any) -> timedelta:
        timeout: timedelta | None = getattr(opts, "timeout", None)
        if timeout is None or timeout <= timedelta(0):  # c10d's "unset" is negative
            return self._timeout
        return timeout

    def _root(self, opts: Any) -> int:
        root: int = 0 if opts is None else getattr(opts, "rootRank", opts)
        return self._member(root, "root")

    def _member(self, rank: int, role: str) -> int:
        """The world's number of a rank of the group."""
        if not 0 <= rank < self.members.size:
            raise _NoSuchRank(
                f"{role} {rank}: expected 0 to {self.members.size - 1}, the ranks of "
                "the process group"
            )
        return self.members.ranks[rank]

    def _native(self, *arguments: Any) -> dist.ProcessGroup | None:
        """NCCL's group for CUDA tensors; None if this group handles them.

        Args:
            arguments: an operation's first arguments. `gather` has no outputs on ranks
                other than the root.
        """
        found = (_first(argument) for argument in arguments)
        tensor = next((each for each in found if each is not None), None)
        return self._nccl if tensor is not None and tensor.is_cuda else None

    @functools.cached_property
    def _nccl(self) -> dist.ProcessGroup | None:
        """NCCL's group of the same ranks; None unless the backend has "cuda:nccl"."""
        if "cuda:nccl" not in dist.get_backend_config(self):
            return None
        store = self._store
        if self.epoch:
            store = PrefixStore(f"reconfigure/{self.epoch}", store)
        if self._generation:
            store = PrefixStore(f"generation/{self._generation}", store)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        rank, size = self.rank(), self.size()
        group = dist.ProcessGroup(store, rank, size)
        nccl = dist.ProcessGroupNCCL(store, rank, size, options)
        group._set_default_backend(_Type.NCCL)
        group._register_backend(_CUDA, _Type.NCCL, nccl)
        if self._members is not None:
            name = f"{self._name}/{self.epoch}/{self._generation}"
            connect_first(group, self._members.ranks, name)
        return group

    @property
    def options(self) -> Any:
        """The options of the group's backend: its name and its time-out."""
        return _c10d.Backend.Options(NAME, self._timeout)

    # torch.distributed reads these before it uses a feature that only NCCL has. It asks
    # the group, or what `_get_backend` returns, which may be the group.
    supports_coalescing = supports_splitting = supports_shrinking = False
    supports_time_estimate = _supports_time_estimate = supports_window = False
    supports_abort_hooks = supports_completion_hooks = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether the group has memory of its own for tensors: it has none."""
        return False

    def _get_backend(self, device: torch.device) -> Any:
        """The backend for a device's tensors: NCCL's, or this process group.

        It has all that torch's Python code asks a backend for.
        """
        if torch.device(device.type) not in self._device_types:
            return super()._get_backend(device)  # raises
        if device.type == "cuda" and self._nccl is not None:
            return self._nccl._get_backend(device)
        return self

    get_backend = _get_backend  # its public name since torch 2.14

    # -- barriers, sequence numbers, unsupported operations ------------------------

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for every member. The error of a time-out names the missing ranks.

        Args:
            timeout: None means the group's time-out.
            wait_all_ranks: has no effect: the error always names all missing ranks.

        Raises:
            CollectiveTimeout: A member did not call in time.
        """
        barrier(group=self.members, timeout=timeout or self._timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.members.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing, because all members count their calls from the first one."""

    def _wait_for_pending_works(self) -> None:
        self.members.drain()

    def _has_hooks(self) -> bool:
        return False

    split_group = _refuse("split_group", "make a group with dist.new_group")
    new_window = _refuse("new_window", "send and receive")
    merge_remote_group = _refuse("merge_remote_group", "make a group of all ranks")
    _enable_collectives_timing = _refuse(
        "_enable_collectives_timing", "time the calls themselves"
    )
    _register_on_completion_hook = _refuse(
        "_register_on_completion_hook", "use the future of each work"
    )

    # -- life ----------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default time-out of an operation."""
        self._timeout = timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Extend the time-out of the next collective.

        torch.compile calls this on every group when it finds a function in its cache:
        other ranks may have to compile it.
        """
        self._extension += timeout
        nccl = nccl_of(self)
        if nccl is not None:
            nccl._add_ephemeral_timeout(timeout)

    def abort(self) -> None:
        """Release this rank from the operation that blocks it. Any thread may call."""
        error = _Aborted("the process group was aborted")
        members, reconfiguration = self._members, self._reconfiguration
        if members is not None:
            members.abort(error)
        if reconfiguration is not None:
            reconfiguration.abort(error)

    def get_error(self) -> Any:
        """What has broken the group, as c10d's `ErrorType`. `abort` is no error."""
        kinds = _c10d.ErrorType
        try:
            if self._members is not None:
                self._members.raise_if_aborted()
        except _Aborted:
            pass
        except CollectiveTimeout:
            return kinds.TIMEOUT
        except Exception:  # noqa: BLE001 - whatever has broken the group
            return kinds.COMM_ERROR
        return kinds.SUCCESS

    def shutdown(self) -> None:
        """Close the group. The world's group stays open.

        NCCL's part waits for the other members to close it, for ten seconds at most.
        """
        nccl = nccl_of(self)
        vars(self).pop("_nccl", None)
        try:
            if nccl is not None:
                shut_down(nccl)
        finally:
            if self._owned is not None:
                self._owned.close()

    def getBackendName(self) -> str:
        """The backend's name, for C++."""
        return NAME

    def name(self) -> str:
        """The backend's name."""
        return NAME

    def setGroupName(self, name: str) -> None:
        """Set the name under which torch.distributed registers the group."""
        self._name = name

    def getGroupName(self) -> str:
        """The name under which torch.distributed registers the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Set the user's description."""
        self._description = description

    def getGroupDesc(self) -> str:
        """The user's description."""
        return self._description


class _Backend(_c10d.Backend):  # type: ignore[misc] # a class that C++ defines
    """What C++ gets when it asks a process group for its backend.

    Each operation is the process group's.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(*group._place)
        # C++ keeps the backend as long as the group, and the garbage collector does not
        # see that.
        self._group = weakref.ref(group)

    def name(self) -> str:
        return NAME

    getBackendName = name


def _operation(name: str) -> Callable[..., Any]:
    def call(self: _Backend, *args: Any) -> Any:
        return getattr(self._group(), name)(*args)

    return call


for _name in (*OPERATORS, "monitored_barrier", "_get_sequence_number_for_group"):
    setattr(_Backend, _name, _operation(_name))


def _make_backend(group: ProcessGroup) -> _Backend | None:
    """The group's backend for C++; None for a torch that takes no such class of Python.

    Since 2.15 torch asks each new group for its backend, and fails if that is None.
    """
    try:
        return _Backend(group)
    except TypeError:  # torch up to 2.13: "No constructor defined"
        return None


class _NoSuchRank(UsageError, RuntimeError):
    """A rank that is no member. torch raises a ValueError or a RuntimeError."""


class _Aborted(CollectiveAborted):
    """Raised by the calls that `ProcessGroup.abort` has ended."""


for _hook in ("pre", "post", "abort"):
    for _verb in ("register", "unregister"):
        _name = f"{_verb}_{_hook}_hook"
        setattr(ProcessGroup, _name, _refuse(_name, "use the future of each work"))


def _one(tensors: Any) -> Tensor:
    """The only tensor of a list. c10d passes lists of one tensor."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"expected a list of one tensor, got {len(tensors)} tensors")
    only: Tensor = tensors[0]
    return only


def _first(tensors: Any) -> Tensor | None:
    """The first tensor of nested lists; None if they are empty."""
    while not isinstance(tensors, Tensor):
        if not isinstance(tensors, (list, tuple)) or not tensors:
            return None
        tensors = tensors[0]
    return tensors


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with a copy of each that shares memory with one before it."""
    storages: set[int] = set()
    found = []
    for tensor in tensors:
        storage = 0 if tensor.is_sparse else tensor.untyped_storage().data_ptr()
        found.append(tensor.clone() if storage and storage in storages else tensor)
        storages.add(storage)
    return found


def _only_list(lists: Any) -> list[Tensor]:
    if lists and isinstance(lists[0], Tensor):
        return list(lists)
    if len(lists) != 1:
        raise UsageError(f"expected one list of tensors, got {len(lists)} lists")
    return list(lists[0])


def _contiguous(tensors: Any) -> Tensor:
    tensor = _one(tensors)
    if not tensor.is_contiguous():
        raise UsageError(
            f"a tensor with strides {tensor.stride()}: expected a contiguous tensor; "
            "pass tensor.contiguous()"
        )
    return tensor


def _reduction(
    opts: Any, plain: _Call, premultiplied: _Call, *arguments: object
) -> _Call:
    """Bind the arguments and the reduce-op to one of two functions.

    Args:
        opts: c10d's options, which have the reduce-op; None means a sum, as in c10d.
        plain: for all reduce-ops but PREMUL_SUM.
        premultiplied: for PREMUL_SUM. Its last argument is the factor.
        arguments: the first arguments of either function.
    """
    op = getattr(opts, "reduceOp", opts)
    kind = getattr(op, "op", op)  # the enum, or an object around it
    name = "sum" if kind is None else c10d_name(op)
    if name is not None:
        return functools.partial(plain, *arguments, name)
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]  # c10d has no public accessor
        return functools.partial(premultiplied, *arguments, factor)
    raise NotImplementedError(f"nbdist has no reduce-op {kind}")
