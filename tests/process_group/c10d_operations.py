"""Each operation of c10d's ProcessGroup works, or is refused with its name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from default_process_groups import run_cases
from mpi4py import MPI
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nbdist.collectives.torch_backend.process_group import ProcessGroup
from nbdist.errors import UnsupportedCollective

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
OTHER = (RANK + 1) % SIZE
NO_OPERATION = {
    "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL",
    "_backend_id", "_device_types", "_get_backend", "_get_backend_name", "_id",
    "_pybind11_conduit_v1_", "_register_backend", "_set_default_backend",
    "_set_group_desc", "_set_group_name", "bound_device_id", "boxed", "unbox",
    "get_group_store", "group_desc", "group_name", "name", "rank", "size",
    "use_pg_for_symm_mem_rendezvous", "abort", "shutdown", "get_backend",
    "supports_reconfigure", "supports_window", "supports_abort_hooks",
    "supports_completion_hooks",
}  # fmt: skip
"""Methods that name, describe or end a group."""
OF_RECONFIGURED = {"get_reconfigure_handle", "reconfigure"}
"""Methods of torch 2.14 and later, which `reconfigured.py` tests."""


def run_all_cases() -> dict[str, str | None]:
    """Run every case. Returns this rank's errors, by case. Every rank must call."""
    return run_cases(CASES)


# -- all operations --------------------------------------------------------------------


def ones(count: int = 2) -> Tensor:
    return torch.ones(count)


def rooted(options: Any) -> Any:
    options.rootRank = 0
    return options


def only_root(value: list[Any]) -> list[Any]:
    return value if RANK == 0 else []


def sum_of(call: Callable[[Tensor], Any]) -> None:
    tensor = ones()
    call(tensor).wait()
    assert (tensor == SIZE).all()


def gathered(call: Callable[[Tensor, Tensor], Any]) -> None:
    output = torch.empty(SIZE)
    call(output, torch.tensor([float(RANK)])).wait()
    assert output.tolist() == list(range(SIZE))


def scattered(call: Callable[[Tensor, Tensor], Any]) -> None:
    output = torch.empty(1)
    call(output, torch.arange(float(SIZE))).wait()
    assert output.item() == SIZE * RANK


def swapped(call: Callable[[Tensor, Tensor], Any]) -> None:
    output = torch.empty(SIZE)
    call(output, torch.full((SIZE,), float(RANK))).wait()
    assert output.tolist() == list(range(SIZE))


def messages(pg: Any, receive: Callable[[list[Tensor]], Any]) -> None:
    room = torch.empty(2)
    sent = pg.send([torch.full((2,), float(RANK))], OTHER, 5)
    receive([room]).wait()
    sent.wait()
    assert (room == (RANK - 1) % SIZE).all()


def from_root(call: Callable[[Tensor, list[Tensor]], Any]) -> None:
    output = torch.empty(1)
    call(output, list(torch.arange(float(SIZE)).split(1))).wait()
    assert output.item() == RANK


def to_root(call: Callable[[list[Tensor], Tensor], Any]) -> None:
    outputs = [torch.empty(1) for _ in range(SIZE)]
    call(outputs, torch.tensor([float(RANK)])).wait()
    if RANK == 0:
        assert torch.cat(outputs).tolist() == list(range(SIZE))


def joined(call: Callable[[Tensor, Tensor, Any], Any]) -> None:
    output = torch.empty(SIZE if RANK == 0 else 0)
    call(output, torch.tensor([float(RANK)]), rooted(dist.GatherOptions())).wait()
    assert output.tolist() == (list(range(SIZE)) if RANK == 0 else [])


def reduced(call: Callable[[Tensor], Any]) -> None:
    tensor = ones()
    call(tensor).wait()
    assert (tensor == (SIZE if RANK == 0 else 1)).all()


def coalesced(pg: Any) -> None:
    device = torch.device("cpu")
    tensors = [ones(), ones()]
    pg._start_coalescing(device)
    for each in tensors:
        pg.allreduce([each], dist.AllreduceOptions())
    pg._end_coalescing(device).wait()
    assert all((each == SIZE).all() for each in tensors)


def numbered(pg: Any) -> None:
    before = pg._get_sequence_number_for_group()
    pg.barrier().wait()
    assert pg._get_sequence_number_for_group() == before + 1


def pending(pg: Any) -> None:
    tensor = ones()
    pg.allreduce([tensor], dist.AllreduceOptions())
    pg._wait_for_pending_works()
    assert (tensor == SIZE).all()


def with_timeout(pg: Any) -> None:
    pg.set_timeout(timedelta(seconds=7))
    assert pg._timeout_of(None) == timedelta(seconds=7)


def extended(pg: Any) -> None:
    before = pg._timeout_of(None)
    pg._add_ephemeral_timeout(timedelta(seconds=9))
    pg.barrier().wait()  # would raise at the end of its time-out
    assert pg._timeout_of(None) == before
    assert not pg._extension, "the extension is for one collective"


CALLS: dict[str, Callable[[Any], object]] = {
    "_add_ephemeral_timeout": extended,
    "_allgather_base": lambda pg: gathered(pg._allgather_base),
    "_end_coalescing": coalesced,
    "_get_sequence_number_for_group": numbered,
    "_has_hooks": lambda pg: pg._has_hooks(),
    "_reduce_scatter_base": lambda pg: scattered(pg._reduce_scatter_base),
    "_set_sequence_number_for_group": lambda pg: pg._set_sequence_number_for_group(),
    "_start_coalescing": coalesced,
    "_wait_for_pending_works": pending,
    "all_gather_single": lambda pg: gathered(pg.all_gather_single),
    "all_gather_single_coalesced": lambda pg: gathered(
        lambda output, one: pg.all_gather_single_coalesced([output], [one])
    ),
    "all_to_all_single": lambda pg: swapped(
        lambda output, one: pg.all_to_all_single(output, one, [], [])
    ),
    "allgather": lambda pg: gathered(
        lambda output, one: pg.allgather([list(output.split(1))], [one])
    ),
    "allgather_coalesced": lambda pg: gathered(
        lambda output, one: pg.allgather_coalesced(
            [[each] for each in output.split(1)], [one]
        )
    ),
    "allgather_into_tensor_coalesced": lambda pg: gathered(
        lambda output, one: pg.allgather_into_tensor_coalesced([output], [one])
    ),
    "allreduce": lambda pg: sum_of(lambda t: pg.allreduce([t])),
    "allreduce_coalesced": lambda pg: sum_of(lambda t: pg.allreduce_coalesced([t])),
    "alltoall": lambda pg: swapped(
        lambda output, one: pg.alltoall(list(output.split(1)), list(one.split(1)))
    ),
    "alltoall_base": lambda pg: swapped(
        lambda output, one: pg.alltoall_base(output, one, [], [])
    ),
    "barrier": lambda pg: pg.barrier().wait(),
    "broadcast": lambda pg: pg.broadcast([ones()], rooted(dist.BroadcastOptions())),
    "gather": lambda pg: to_root(
        lambda outputs, one: pg.gather(
            only_root([outputs]), [one], rooted(dist.GatherOptions())
        )
    ),
    "gather_into_tensor": lambda pg: joined(pg.gather_into_tensor),
    "gather_single": lambda pg: joined(pg.gather_single),
    "monitored_barrier": lambda pg: pg.monitored_barrier(timedelta(seconds=5)),
    "recv": lambda pg: messages(pg, lambda room: pg.recv(room, OTHER, 5)),
    "recv_anysource": lambda pg: messages(pg, lambda room: pg.recv_anysource(room, 5)),
    "reduce": lambda pg: reduced(
        lambda tensor: pg.reduce([tensor], rooted(dist.ReduceOptions()))
    ),
    "reduce_scatter": lambda pg: scattered(
        lambda output, one: pg.reduce_scatter([output], [list(one.split(1))])
    ),
    "reduce_scatter_single": lambda pg: scattered(pg.reduce_scatter_single),
    "reduce_scatter_single_coalesced": lambda pg: scattered(
        lambda output, one: pg.reduce_scatter_single_coalesced([output], [one])
    ),
    "reduce_scatter_tensor_coalesced": lambda pg: scattered(
        lambda output, one: pg.reduce_scatter_tensor_coalesced([output], [one])
    ),
    "scatter": lambda pg: from_root(
        lambda output, parts: pg.scatter(
            [output], only_root([parts]), rooted(dist.ScatterOptions())
        )
    ),
    "send": lambda pg: messages(pg, lambda room: pg.recv(room, OTHER, 5)),
    "set_timeout": with_timeout,
}  # fmt: skip
REFUSED = {
    "_enable_collectives_timing", "_register_on_completion_hook",
    "merge_remote_group", "new_window",
    "register_abort_hook", "register_post_hook", "register_pre_hook", "split_group",
    "unregister_abort_hook", "unregister_post_hook", "unregister_pre_hook",
}  # fmt: skip


def every_operation_is_answered_or_refused() -> None:
    group = dist.distributed_c10d._get_default_group()
    assert isinstance(group, ProcessGroup)
    offered = set(dir(dist.ProcessGroup)) - set(dir(object)) - {"__module__"}
    # Older versions of torch have fewer.
    more = offered - NO_OPERATION - CALLS.keys() - REFUSED - OF_RECONFIGURED
    assert not more, f"c10d has operations that are not tested: {sorted(more)}"
    for name in REFUSED:
        with pytest.raises(NotImplementedError, match=name):
            getattr(group, name)()
    for call in CALLS.values():
        call(group)


def torch_gets_a_backend_wherever_it_asks() -> None:
    """By Python, by C++, and by each hook that it attaches to a new group."""
    group: Any = dist.distributed_c10d._get_default_group()
    cpu = torch.device("cpu")
    backends = {id(each): each for each in (group._get_backend(cpu), group)}
    if hasattr(dist.ProcessGroup, "get_backend"):
        found = group.get_backend(cpu)
        backends[id(found)] = found
    c10d: Any = torch._C._distributed_c10d
    questions = [each for each in dir(c10d.Backend) if "supports_" in each]
    for backend in backends.values():
        assert backend.options._timeout == group._timeout
        for name in {"_supports_time_estimate", "supports_tensor_alloc", *questions}:
            answer = getattr(backend, name)
            answer = answer(cpu) if callable(answer) else answer
            assert answer is (name == "supports_reconfigure"), name
    if group._backend is None:  # torch up to 2.13
        return
    for hook in ("HealthCheckHook", "FlightRecorderHook", "NanCheckHook"):
        if (kind := getattr(c10d, hook, None)) and hasattr(kind, "attach"):
            kept = kind.attach(group)  # also of a group that has one
            sum_of(lambda t: group.allreduce([t]))
            del kept
    tensor = ones()
    native = dist.ProcessGroup.allreduce  # past our method, as C++ calls it
    native(group, [tensor], dist.AllreduceOptions()).wait()
    assert (tensor == SIZE).all()
    options = c10d.Backend.allreduce(group._backend, [tensor], dist.AllreduceOptions())
    options.wait()
    assert (tensor == SIZE * SIZE).all()


def tensors_of_one_call_may_share_memory() -> None:
    """gloo reduces the values that the tensors had before the call."""
    total = float(SIZE * (SIZE + 1) // 2)
    for reduce in (
        dist.all_reduce_coalesced,
        lambda tensors: dist.all_reduce_coalesced(tensors, async_op=True).wait(),
    ):
        whole = torch.full((6,), RANK + 1.0)
        # On one rank the tensors are apart, which the others need not know.
        parts = [whole, whole, whole[1:3], whole.view(2, 3).T]
        if RANK == 0:
            parts = [each.clone() for each in parts]
        reduce(parts)
        assert all((each == total).all() for each in parts)


def a_rank_that_is_no_member_is_refused_as_torch_refuses_it() -> None:
    calls: dict[str, Callable[[int], object]] = {
        "broadcast": lambda rank: dist.broadcast(ones(), rank),
        "reduce": lambda rank: dist.reduce(ones(), rank),
        "gather": lambda rank: dist.gather(ones(), None, rank),
        "scatter": lambda rank: dist.scatter(ones(), None, rank),
        "send": lambda rank: dist.send(ones(), rank),
        "isend": lambda rank: dist.isend(ones(), rank),
        "recv": lambda rank: dist.recv(ones(), rank),
        "irecv": lambda rank: dist.irecv(ones(), rank),
        "objects": lambda rank: dist.broadcast_object_list([1], rank),
    }
    for call in calls.values():
        for rank in (-SIZE, -1, SIZE, SIZE + 5):
            for kind in (RuntimeError, ValueError):  # torch's, by the group
                with pytest.raises(kind, match=f"{rank}: expected 0 to {SIZE - 1}"):
                    call(rank)


def every_reduce_op_is_answered() -> None:
    for name, op in dist.ReduceOp.RedOpType.__members__.items():
        if name == "PREMUL_SUM":
            continue
        tensor = torch.ones(3, dtype=torch.int64 if name[0] == "B" else torch.float32)
        dist.all_reduce(tensor, op)


# -- PREMUL_SUM ------------------------------------------------------------------------


def premul_sum_everywhere() -> None:
    total = sum(range(1, SIZE + 1))
    for factor in (0.5, torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.float64)):
        op = dist._make_nccl_premul_sum(factor)
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            mine = torch.full((3, 2), RANK + 1.0, dtype=dtype)
            tensor = mine.clone().t()
            dist.all_reduce(tensor, op)
            assert tensor.dtype == dtype
            assert (tensor == 0.5 * total).all()
            tensor = mine.clone()
            dist.reduce(tensor, 0, op)
            assert (tensor == (0.5 * total if RANK == 0 else RANK + 1)).all()
            output = torch.empty(3, 2, dtype=dtype)
            dist.reduce_scatter(output, [mine] * SIZE, op)
            assert (output == 0.5 * total).all()
            dist.reduce_scatter_tensor(output, torch.cat([mine] * SIZE), op)
            assert (output == 0.5 * total).all()
            assert (mine == RANK + 1).all(), "an input was scaled"


def premul_sum_may_differ_and_be_asynchronous() -> None:
    tensor = torch.ones(4)
    op = dist._make_nccl_premul_sum(float(RANK + 1))
    work = dist.all_reduce(tensor, op, async_op=True)
    work.wait()
    assert (tensor == sum(range(1, SIZE + 1))).all()
    with pytest.raises(UnsupportedCollective, match="int64"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), op)


# -- batches ---------------------------------------------------------------------------


def batch(tensor: Tensor, room: Tensor) -> list[dist.P2POp]:
    """Both ranks send before they receive."""
    return [
        dist.P2POp(dist.isend, tensor, OTHER),
        dist.P2POp(dist.irecv, room, (RANK - 1) % SIZE),
    ]


def batches_do_not_wait_for_their_own_receives() -> None:
    for length in (1, 3_000_000):  # more than MPI takes without a receiver
        tensor, room = torch.full((length,), float(RANK)), torch.empty(length)
        for work in dist.batch_isend_irecv(batch(tensor, room)):
            work.wait()
        assert (room == (RANK - 1) % SIZE).all()


class Nccl:
    """The calls of NCCL's group, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.log.append(f"start {device.type}")

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self.log.append(f"send to {peer}")

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self.log.append(f"recv from {peer}")

    def _end_coalescing(self, device: torch.device) -> str:
        self.log.append("end")
        return "work"


def batches_are_one_group_of_nccl() -> None:
    group: Any = dist.distributed_c10d._get_default_group()
    nccl = Nccl()
    with mock.patch.dict(group.__dict__, _nccl=nccl), FakeTensorMode():
        tensor, room = (torch.empty(5, device="cuda") for _ in range(2))
        works = dist.batch_isend_irecv(batch(tensor, room))
    assert works == ["work"]
    sent, received = f"send to {OTHER}", f"recv from {(RANK - 1) % SIZE}"
    assert nccl.log == ["start cuda", sent, received, "end"]


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        every_operation_is_answered_or_refused,
        torch_gets_a_backend_wherever_it_asks,
        tensors_of_one_call_may_share_memory,
        a_rank_that_is_no_member_is_refused_as_torch_refuses_it,
        every_reduce_op_is_answered,
        premul_sum_everywhere,
        premul_sum_may_differ_and_be_asynchronous,
        batches_do_not_wait_for_their_own_receives,
        batches_are_one_group_of_nccl,
    )
}
