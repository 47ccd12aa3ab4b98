"""A backend of torch.distributed over these collectives.

After `register()`, `dist.init_process_group("nbdist")` works on every rank that has
joined a world. With "cpu:nbdist,cuda:nccl", tensors on GPUs go to NCCL instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

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
from nbdist.collectives.ops.validation import split_evenly
from nbdist.collectives.reduction import c10d_name
from nbdist.collectives.torch_backend.rendezvous import members_of
from nbdist.collectives.torch_backend.work import (
    CollectiveWork,
    MessageWork,
    WorkList,
    in_callback,
    original_error,
)
from nbdist.errors import CollectiveAborted, UsageError

__all__ = [
    "CollectiveWork",
    "ProcessGroup",
    "coalesce_batches",
    "original_error",
    "register",
]

NAME = "nbdist"
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")
_Type = dist.ProcessGroup.BackendType
_Operation = Callable[..., dist.Work]
_Call = Callable[..., Handle | None]


def register() -> None:
    """Tell torch.distributed of the backend. Safe to call twice."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            NAME, _create, extended_api=True, devices=["cpu", "cuda"]
        )
        coalesce_batches()


def _create(options: Any, _: object) -> ProcessGroup:
    """What torch.distributed calls on each member of a new process group."""
    ranks = options.global_ranks_in_group
    members = members_of(ranks, options.group_rank, options.group_size)
    owned = members if ranks else None
    return ProcessGroup(options.store, members, options.timeout, owned)


def _by_device(operation: _Operation) -> _Operation:
    """Give tensors on GPUs to NCCL, where that is the group's backend for them."""

    @functools.wraps(operation)
    def chosen(self: ProcessGroup, tensors: Any, *args: Any, **options: Any) -> Any:
        native = self._native(tensors)
        if native is None:
            return operation(self, tensors, *args, **options)
        return getattr(native, operation.__name__)(tensors, *args, **options)

    return chosen


def _refuse(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"nbdist has no {name}: {instead}")

    refuse.__name__ = name.rsplit(".", 1)[-1]
    refuse.__doc__ = f"Refused: {instead}."
    return refuse


class ProcessGroup(dist.ProcessGroup):
    """A group of ranks, as torch.distributed and all that is built on it see one.

    Every operation takes what c10d's has: lists of one tensor, an options object, ranks
    that count within the group. Those without `asyncOp` return when the result is in
    place; the others at once, and run in the order of the calls in the group's thread.

    Operations raise what those of `nbdist.collectives` raise.
    """

    def __init__(
        self,
        store: Store,
        members: Group,
        timeout: timedelta,
        owned: Group | None = None,
    ) -> None:
        """Make it. Every member must.

        Args:
            store: where NCCL's ranks meet.
            members: the ranks.
            timeout: for operations that come without one.
            owned: a group to close in `shutdown`.
        """
        # The one constructor that a Python subclass can use; torch's stubs lack it.
        super().__init__(members.rank, members.size)  # type: ignore[call-arg]
        self.members = members
        self._store = store
        self._timeout = timeout
        self._owned = owned
        self._name = self._description = ""
        self._coalesced: list[dist.Work] | None = None
        for device in (_CPU, _CUDA) if torch.cuda.is_available() else (_CPU,):
            self._register_backend(device, _Type.CUSTOM, None)

    # -- reductions ----------------------------------------------------------------

    @_by_device
    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """all_reduce, in place."""
        tensor = _one(tensors)
        call = _reduction(opts, all_reduce, premul_sum_all_reduce, tensor)
        return self._run(call, opts, [tensor])

    @_by_device
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """all_reduce of several tensors."""
        return WorkList([self.allreduce(tensor, opts) for tensor in tensors])

    @_by_device
    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        """reduce to one rank."""
        tensor, root = _one(tensors), self._root(opts)
        call = _reduction(opts, reduce, premul_sum_reduce, tensor, root)
        return self._run(call, opts, [tensor])

    @_by_device
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """reduce_scatter of a list of tensors."""
        output, pieces = _one(outputs), _only_list(inputs)
        kinds = reduce_scatter, premul_sum_reduce_scatter
        call = _reduction(opts, *kinds, output, pieces)
        return self._run(call, opts, [output])

    @_by_device
    def _reduce_scatter_base(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> dist.Work:
        """reduce_scatter of one tensor that holds all parts."""
        kinds = reduce_scatter_tensor, premul_sum_reduce_scatter_tensor
        call = _reduction(opts, *kinds, output, input)
        return self._run(call, opts, [output])

    @_by_device
    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        """reduce_scatter of several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return WorkList([self._reduce_scatter_base(*pair, opts) for pair in pairs])

    # -- moving --------------------------------------------------------------------

    @_by_device
    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        """broadcast from one rank, in place."""
        tensor, root = _one(tensors), self._root(opts)
        return self._run(functools.partial(broadcast, tensor, root), opts, [tensor])

    @_by_device
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """all_gather into a list of tensors."""
        parts, tensor = _only_list(outputs), _one(inputs)
        return self._run(functools.partial(all_gather, parts, tensor), opts, parts)

    @_by_device
    def allgather_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        """all_gather of several tensors; `outputs[r]` are those of rank r."""
        columns = zip(*outputs, strict=True)
        pairs = zip(columns, inputs, strict=True)
        return WorkList(
            [self.allgather([list(column)], [one], opts) for column, one in pairs]
        )

    @_by_device
    def _allgather_base(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> dist.Work:
        """all_gather into one tensor."""
        call = functools.partial(all_gather_into_tensor, output, input)
        return self._run(call, opts, [output])

    @_by_device
    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        """all_gather of several tensors, each into one."""
        pairs = zip(outputs, inputs, strict=True)
        return WorkList([self._allgather_base(*pair, opts) for pair in pairs])

    @_by_device
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """all_to_all of lists of tensors."""
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
        """all_to_all of runs of rows."""
        call = functools.partial(
            all_to_all_single, output, input, output_sizes, input_sizes
        )
        return self._run(call, opts, [output])

    # torch 2.13's names for the same.
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_to_all_single = alltoall_base

    # -- one rank and the others ---------------------------------------------------

    @_by_device
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """gather on one rank; `outputs` is empty on the others."""
        parts, tensor = _only_list(outputs) if outputs else None, _one(inputs)
        call = functools.partial(gather, tensor, parts, self._root(opts))
        return self._run(call, opts, parts or [])

    @_by_device
    def gather_into_tensor(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        """gather on one rank, into one tensor; `output` does not count elsewhere."""
        root, parts = self._root(opts), None
        if self.members.ranks[self.members.rank] == root:
            parts = list(split_evenly("output", output, input, self.members))
        call = functools.partial(gather, input, parts, root)
        return self._run(call, opts, [output])

    gather_single = gather_into_tensor

    @_by_device
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """scatter from one rank; `inputs` is empty on the others."""
        tensor, parts = _one(outputs), _only_list(inputs) if inputs else None
        call = functools.partial(scatter, tensor, parts, self._root(opts))
        return self._run(call, opts, [tensor])

    @_by_device
    def send(self, tensors: Any, target: int, tag: int = 0) -> dist.Work:
        """send to one rank."""
        tensor, target = _contiguous(tensors), self.members.ranks[target]
        return self._message(isend(tensor, target, group=self.members, tag=tag))

    @_by_device
    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        """receive from one rank."""
        tensor, source = _contiguous(tensors), self.members.ranks[source]
        return self._message(irecv(tensor, source, group=self.members, tag=tag))

    @_by_device
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """receive from any rank."""
        tensor = _contiguous(tensors)
        return self._message(irecv(tensor, group=self.members, tag=tag))

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for every member."""
        return self._run(barrier, opts, [])

    # -- several as one ------------------------------------------------------------

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

    # -- what every operation does -------------------------------------------------

    def _run(self, call: _Call, opts: Any, result: Sequence[Tensor]) -> dist.Work:
        handle = call(
            group=self.members,
            async_op=getattr(opts, "asyncOp", True) and not in_callback(),
            timeout=self._timeout_of(opts),
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
        root: int = getattr(opts, "rootRank", opts)
        return self.members.ranks[root]

    def _native(self, tensors: Any) -> dist.ProcessGroup | None:
        """The group to use in place of this one for these tensors."""
        while not isinstance(tensors, Tensor):
            if not tensors:
                return None
            tensors = tensors[0]
        return self._nccl if tensors.is_cuda else None

    @functools.cached_property
    def _nccl(self) -> dist.ProcessGroup | None:
        """NCCL for the same ranks, where the group was asked for with "cuda:nccl"."""
        if "cuda:nccl" not in dist.get_backend_config(self):
            return None
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        rank, size = self.rank(), self.size()
        group = dist.ProcessGroup(self._store, rank, size)
        nccl = dist.ProcessGroupNCCL(self._store, rank, size, options)
        group._set_default_backend(_Type.NCCL)
        group._register_backend(_CUDA, _Type.NCCL, nccl)
        return group

    # What torch.distributed asks of a backend before it takes a way of NCCL's.
    supports_coalescing = supports_splitting = supports_shrinking = False
    supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> Any:
        """What carries the operations on a device's tensors: NCCL's backend, or this.

        C++ knows no backend of a group whose operations are written in Python.
        """
        if torch.device(device.type) not in self._device_types:
            return super()._get_backend(device)  # raises
        if device.type == "cuda" and self._nccl is not None:
            return self._nccl._get_backend(device)
        return self

    # -- barriers, numbers, and what is refused ------------------------------------

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that tells who is missing when its time runs out, as all here do.

        Args:
            timeout: None takes the group's.
            wait_all_ranks: the error names all who are missing in any case.
        """
        barrier(group=self.members, timeout=timeout or self._timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.members.sequence

    def _set_sequence_number_for_group(self) -> None:
        """The members have counted alike from the first call on."""

    def _wait_for_pending_works(self) -> None:
        self.members.drain()

    def _has_hooks(self) -> bool:
        return False

    split_group = _refuse("split_group", "make a group with dist.new_group")
    new_window = _refuse("new_window", "send and receive")
    reconfigure = _refuse("reconfigure", "the world renews its groups by itself")
    get_reconfigure_handle = _refuse(
        "get_reconfigure_handle", "the world renews its groups by itself"
    )
    _add_ephemeral_timeout = _refuse(
        "_add_ephemeral_timeout", "give the call its time-out"
    )
    merge_remote_group = _refuse("merge_remote_group", "make a group of all ranks")
    _enable_collectives_timing = _refuse(
        "_enable_collectives_timing", "time the calls themselves"
    )
    _register_on_completion_hook = _refuse(
        "_register_on_completion_hook", "use the future of each work"
    )

    # -- life ----------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of operations that come without one."""
        self._timeout = timeout

    def abort(self) -> None:
        """Release this rank from what it is blocked in. Any thread may call."""
        self.members.abort(CollectiveAborted("the process group was aborted"))

    def shutdown(self) -> None:
        """Give back what the group holds. The world's own group stays."""
        if self._owned is not None:
            self._owned.close()

    def getBackendName(self) -> str:
        """What C++ calls it."""
        return NAME

    def name(self) -> str:
        """The backend's name."""
        return NAME

    def setGroupName(self, name: str) -> None:
        """Take the name under which torch.distributed registers the group."""
        self._name = name

    def getGroupName(self) -> str:
        """The name under which torch.distributed registers the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Take the user's description."""
        self._description = description

    def getGroupDesc(self) -> str:
        """The user's description."""
        return self._description


for _hook in ("pre", "post", "abort"):
    for _verb in ("register", "unregister"):
        _name = f"{_verb}_{_hook}_hook"
        setattr(ProcessGroup, _name, _refuse(_name, "use the future of each work"))


def _one(tensors: Any) -> Tensor:
    """c10d passes lists, from the days of several GPUs per process."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"expected one tensor for each rank, got {len(tensors)}")
    only: Tensor = tensors[0]
    return only


def _only_list(lists: Any) -> list[Tensor]:
    if lists and isinstance(lists[0], Tensor):
        return list(lists)
    if len(lists) != 1:
        raise UsageError(f"expected one list of tensors, got {len(lists)}")
    return list(lists[0])


def _contiguous(tensors: Any) -> Tensor:
    tensor = _one(tensors)
    if not tensor.is_contiguous():
        raise UsageError(
            f"a tensor of strides {tensor.stride()}: expected a contiguous one; send "
            "tensor.contiguous()"
        )
    return tensor


def _reduction(
    opts: Any, plain: _Call, premultiplied: _Call, *arguments: object
) -> _Call:
    """The one of two functions that the reduce-op asks for, given all it needs.

    c10d's default is a sum.
    """
    op = getattr(opts, "reduceOp", opts)
    kind = getattr(op, "op", op)  # the enum, or an object around it
    name = "sum" if kind is None else c10d_name(op)
    if name is not None:
        return functools.partial(plain, *arguments, name)
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]  # there is no other way to ask for it
        return functools.partial(premultiplied, *arguments, factor)
    raise NotImplementedError(f"nbdist has no reduce-op {kind}")


if TYPE_CHECKING:
    from nbdist.collectives.group import Group


def coalesce_batches() -> None:
    """Let `dist.batch_isend_irecv` coalesce messages of our process groups too.

    torch does it for groups of exactly its own class, and else begins the messages one
    by one. NCCL would then wait in each for its other end, and two ranks that each send
    before they receive would wait for each other. Safe to call twice.
    """
    if distributed_c10d.batch_isend_irecv is not _batch_isend_irecv:
        distributed_c10d.batch_isend_irecv = _batch_isend_irecv
        dist.batch_isend_irecv = _batch_isend_irecv


_one_by_one = distributed_c10d.batch_isend_irecv


@functools.wraps(_one_by_one)
def _batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    first: Any = p2p_op_list[0] if p2p_op_list else None
    group: Any = getattr(first, "group", None) or distributed_c10d._get_default_group()
    ours = isinstance(first, dist.P2POp) and isinstance(group, ProcessGroup)
    works: list[dist.Work]
    if not ours or group._native(first.tensor) is None:
        works = _one_by_one(p2p_op_list)  # in our own messages nothing waits
        return works
    distributed_c10d._check_p2p_op_list(p2p_op_list)
    device = first.tensor.device
    coalescing: Any = distributed_c10d._coalescing_manager
    with coalescing(group, device, async_ops=True) as batch:
        for each in p2p_op_list:
            peer = "group_dst" if each.op is dist.isend else "group_src"
            each.op(
                each.tensor,
                group=each.group,
                tag=each.tag,
                **{peer: each.group_peer},
            )
    works = batch.works
    return works
