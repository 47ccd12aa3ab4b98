"""What PyTorch builds on its process groups, over this backend, on each rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from default_process_groups import run_cases
from mpi4py import MPI
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from nbdist.errors import CollectiveTimeout, UnsupportedCollective, UsageError

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def run_all_cases() -> dict[str, str | None]:
    """Every case; what went wrong on this rank, by case. Every rank must call."""
    return run_cases(CASES)


def world() -> Any:
    return dist.group.WORLD


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape or (4,), **options)


# -- torch.compile ---------------------------------------------------------------------


def compiled(body: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = torch.compile(body, backend="eager")(ones() * (RANK + 1))
    return result


def compile_broadcasts() -> None:
    def body(x: Tensor) -> Tensor:
        dist.broadcast(x, 1)
        return x + 1

    assert (compiled(body) == 3).all()


def compile_reduces_asynchronously() -> None:
    def body(x: Tensor) -> Tensor:
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        return x + 1

    assert (compiled(body) == sum(range(1, SIZE + 1)) + 1).all()


def compile_sends_and_receives() -> None:
    def body(x: Tensor) -> Tensor:
        if RANK == 0:
            dist.send(x, 1)
        elif RANK == 1:
            dist.recv(x, 0)
        return x + 1

    assert (compiled(body) == (2 if RANK < 2 else RANK + 2)).all()


def compile_trains_with_ddp() -> None:
    model = nn.Linear(4, 4)
    ddp = DistributedDataParallel(model)
    step = torch.compile(ddp, backend="aot_eager")
    for _ in range(3):
        model.zero_grad()
        step(ones(2, 4) * (RANK + 1)).sum().backward()
        mean = (SIZE + 1) / 2
        assert model.weight.grad is not None
        assert torch.allclose(model.weight.grad, ones(4, 4) * 2 * mean)


# -- autograd --------------------------------------------------------------------------


def gradients_flow_through_functional_collectives() -> None:
    equal = [4 // SIZE] * SIZE
    for collective, expected in (
        (lambda x: functional.all_gather_tensor_autograd(x, 0, world()), SIZE),
        (lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, world()), 1),
        (
            lambda x: functional.all_to_all_single_autograd(x, equal, equal, world()),
            1,
        ),
    ):
        x = ones(requires_grad=True)
        (collective(x) * 1.0).sum().backward()
        assert x.grad is not None
        assert (x.grad == expected).all()


def inference_mode_communicates() -> None:
    with torch.inference_mode():
        x = ones()
        dist.all_reduce(x, async_op=True).wait()
        assert (x == SIZE).all()
        strided = ones(4, 4)[:, 1]
        dist.all_reduce(strided, async_op=True).wait()
        assert (strided == SIZE).all()
        assert (functional.all_reduce(ones(), "sum", world()) + 0 == SIZE).all()
        gathered = functional.all_gather_tensor(ones(), 0, world())
        assert (gathered + 0 == ones(4 * SIZE)).all()


def views_of_a_leaf_stay_valid() -> None:
    leaf = nn.Parameter(ones() * (RANK + 1))
    before = leaf._version
    loss = (leaf * leaf).sum()
    dist.broadcast(leaf, 0)
    assert leaf._version == before
    loss.backward()
    assert (leaf == 1).all()


def output_lists_may_be_views() -> None:
    rows = torch.zeros(SIZE, 4, requires_grad=True) * 1
    parts = list(rows.unbind())
    dist.all_gather(parts, ones() * RANK)
    assert rows[:, 0].tolist() == list(range(SIZE))


# -- DDP -------------------------------------------------------------------------------


def ddp_takes_its_builtin_hooks() -> None:
    kinds: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]
    for kind in (kinds.ALLREDUCE, kinds.FP16_COMPRESS):
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        ddp._register_builtin_comm_hook(kind)
        ddp(ones(2, 4) * (RANK + 1)).sum().backward()
        assert (ddp.module.weight.grad == SIZE + 1).all()


def ddp_trains_with_sparse_gradients() -> None:
    ddp = DistributedDataParallel(nn.Embedding(8, 3, sparse=True))
    ddp(torch.tensor([1, 1, 2 + RANK])).sum().backward()
    expected = torch.zeros(8, 3)
    expected[1] = 2
    expected[2 : 2 + SIZE] = 1 / SIZE
    gradient = ddp.module.weight.grad
    assert gradient.is_sparse
    assert torch.allclose(gradient.to_dense(), expected)


# -- sparse and uneven tensors, short forms --------------------------------------------


def sparse(elements: int, shape: tuple[int, ...] = (6,)) -> Tensor:
    indices = torch.arange(elements).expand(1, elements)
    values = ones(elements, *shape[1:])
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def sparse_tensors_are_reduced() -> None:
    for shape in ((6,), (6, 2)):
        x = sparse(RANK, shape)  # none on rank 0
        dist.all_reduce(x)
        expected = [SIZE - 1 - n if n < SIZE else 0 for n in range(shape[0])]
        assert x.to_dense().reshape(6, -1)[:, 0].tolist() == expected
    x = sparse(2)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.to_dense().tolist() == [1, 1, 0, 0, 0, 0]
    empty = sparse(0)
    dist.all_reduce(empty)
    assert not empty.to_dense().any()


def other_sparse_calls_raise_on_all_ranks() -> None:
    with pytest.raises(UnsupportedCollective, match="to_dense"):
        dist.all_reduce(sparse(2), dist.ReduceOp.MAX)
    with pytest.raises(UsageError, match="shape"):
        dist.all_reduce(sparse(1, (6 + RANK,)))
    with pytest.raises(UnsupportedCollective, match="to_dense"):
        dist.broadcast(sparse(2), 0)


def outputs_of_reduce_scatter_may_differ() -> None:
    inputs = [ones(rank + 1) * (RANK + 1) for rank in range(SIZE)]
    output = torch.zeros(RANK + 1)
    dist.reduce_scatter(output, inputs)
    assert (output == SIZE * (SIZE + 1) / 2).all()
    assert all((each == RANK + 1).all() for each in inputs)
    work = dist.reduce_scatter(output, inputs, dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait()
    assert (output == SIZE).all()
    with pytest.raises(UsageError, match="shape"):
        dist.reduce_scatter(torch.zeros(9), inputs)


def short_forms_take_keywords() -> None:
    group, limit = world(), timedelta(seconds=10)
    x = ones() * (RANK + 1)
    group.broadcast(x, root=1).wait()
    assert (x == 2).all()
    group.allreduce(x, op=dist.ReduceOp.MAX, timeout=limit).wait()
    assert (x == 2).all()
    y = ones() * (RANK + 1)
    group.reduce(y, 0, dist.ReduceOp.MAX).wait()
    assert (y == (SIZE if RANK == 0 else RANK + 1)).all()
    group.barrier(timeout=limit).wait()
    group.reduce([y]).wait()  # the defaults of c10d's options: SUM to rank 0
    assert RANK > 0 or (y == SIZE + sum(range(2, SIZE + 1))).all()
    for root in (-1, SIZE):
        with pytest.raises(UsageError, match=f"root {root}"):
            group.broadcast(x, root=root)
    assert group.options._timeout == group._timeout
    assert group.options.backend == "nbdist"


def monitored_barrier_names_the_missing_rank() -> None:
    dist.monitored_barrier()
    if RANK == 0:
        with pytest.raises(CollectiveTimeout, match="Missing: rank"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))


# -- tools -----------------------------------------------------------------------------


def tools_see_each_operation() -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as seen:
        dist.all_reduce(ones())
        dist.broadcast(ones(), 0, async_op=True).wait()
        dist.barrier()
        outputs = torch.empty(4 * SIZE)
        dist.all_gather_into_tensor(outputs, ones())
    counts = {str(op): n for op, n in seen.get_comm_counts().items()}
    assert counts == {
        "c10d.allreduce_": 1,
        "c10d.broadcast_": 1,
        "c10d._allgather_base_": 1,
    }
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile:
        x = ones()
        dist.all_reduce(x)
        dist.barrier()
        assert (x == SIZE).all()
    names = [event.key for event in profile.key_averages()]
    assert {"c10d::allreduce_", "c10d::barrier"} <= set(names)


def an_error_passes_through_the_dispatcher() -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode(), pytest.raises(UsageError, match="root 9"):
        world().broadcast(ones(), 9)


def fake_tensors_communicate_nothing() -> None:
    with FakeTensorMode():
        x = ones()
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        assert work.wait()
        dist.barrier()
    assert isinstance(x, FakeTensor)
    sequence = world()._get_sequence_number_for_group()
    assert sequence == 0


def functional_collectives_write_to_an_output() -> None:
    ops, name = torch.ops._c10d_functional, world().group_name
    out = torch.empty(4 * SIZE)
    result = ops.all_gather_into_tensor_out(ones(), SIZE, name, out=out)
    assert (ops.wait_tensor(result) == 1).all()
    if not hasattr(ops, "reduce_scatter_tensor_out"):  # torch 2.7 has none
        return
    part = torch.empty(4)
    result = ops.reduce_scatter_tensor_out(ones(4 * SIZE), "sum", SIZE, name, out=part)
    assert (ops.wait_tensor(result) == SIZE).all()


def sharded_tensors_are_gathered_on_the_cpu() -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    placements: Any = [f"rank:{rank}/cpu" for rank in range(SIZE)]
    spec = ChunkShardingSpec(dim=0, placements=placements)
    with mock.patch("warnings.warn"):  # torch's own: it is deprecated
        sharded = sharded_tensor.ones(spec, 4, 2)
        out = torch.zeros(4, 2) if RANK == 0 else None
        sharded.gather(0, out)
    assert out is None or (out == 1).all()


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        compile_broadcasts,
        compile_reduces_asynchronously,
        compile_sends_and_receives,
        compile_trains_with_ddp,
        gradients_flow_through_functional_collectives,
        inference_mode_communicates,
        views_of_a_leaf_stay_valid,
        output_lists_may_be_views,
        ddp_takes_its_builtin_hooks,
        ddp_trains_with_sparse_gradients,
        sparse_tensors_are_reduced,
        other_sparse_calls_raise_on_all_ranks,
        outputs_of_reduce_scatter_may_differ,
        short_forms_take_keywords,
        monitored_barrier_names_the_missing_rank,
        tools_see_each_operation,
        an_error_passes_through_the_dispatcher,
        fake_tensors_communicate_nothing,
        functional_collectives_write_to_an_output,
        sharded_tensors_are_gathered_on_the_cpu,
    )
}
