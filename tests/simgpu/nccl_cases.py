"""torch.distributed over NCCL, on simulated GPUs. `test_nccl.py` runs this on ranks.

Each rank has a GPU. Inputs are small integers, so that every dtype holds the results.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed import ReduceOp

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
TOTAL = SIZE * (SIZE + 1) // 2
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64]
LONG = 200_000_000
"""Clock ticks: some 0.1 s."""
REMOTE_ERROR = 6


def run_cases(names: list[str]) -> dict[str, str | None]:
    """Run the named cases; the traceback of each on this rank, or None, by case."""
    torch.cuda.set_device(RANK)
    torch.set_default_device("cuda")
    outcomes = {}
    for name in names:
        folder = COMM.bcast(os.environ["TMPDIR"])
        store = dist.FileStore(str(Path(folder) / name), SIZE)
        dist.init_process_group(
            "nccl",
            store=store,
            rank=RANK,
            world_size=SIZE,
            timeout=timedelta(seconds=60),
            # Groups are then divided by ncclCommSplit, and otherwise made by an id.
            device_id=torch.device("cuda", RANK) if name in DIVIDING else None,
        )
        try:
            CASES[name]()
            torch.cuda.synchronize()
            outcomes[name] = None
        except BaseException:  # noqa: BLE001 - it is the outcome
            outcomes[name] = traceback.format_exc()
        COMM.Barrier()
        if name not in ABORTING:
            dist.destroy_process_group()
        elif dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
        COMM.Barrier()
    return outcomes


def own(dtype: torch.dtype = torch.float32, length: int = 5) -> Tensor:
    return torch.full((length,), RANK + 1, dtype=dtype)


def every_reduction() -> None:
    for dtype in DTYPES:
        product = torch.tensor(range(1, SIZE + 1)).prod().item()
        expected = {
            ReduceOp.SUM: TOTAL,
            ReduceOp.PRODUCT: product,
            ReduceOp.MIN: 1,
            ReduceOp.MAX: SIZE,
        }
        for op, value in expected.items():
            tensor = own(dtype)
            dist.all_reduce(tensor, op)
            assert (tensor == value).all(), (dtype, op, tensor)
            tensor = own(dtype)
            dist.reduce(tensor, SIZE - 1, op)
            if RANK == SIZE - 1:
                assert (tensor == value).all(), (dtype, op, tensor)
            else:
                assert (tensor == RANK + 1).all(), "another rank's input has changed"
            output = torch.empty(2, dtype=dtype)
            dist.reduce_scatter_tensor(output, own(dtype, 2 * SIZE), op)
            assert (output == value).all(), (dtype, op, output)
    for dtype in FLOATS:
        tensor = own(dtype)
        dist.all_reduce(tensor, ReduceOp.AVG)
        assert (tensor == TOTAL / SIZE).all()
    tensor = torch.tensor([RANK == 0, True])
    dist.all_reduce(tensor)
    assert tensor.tolist() == [True, True]
    tensor = torch.tensor([1.0, float("nan") if RANK == 0 else 2.0])
    dist.all_reduce(tensor, ReduceOp.MAX)
    assert tensor.tolist() == [1.0, 2.0], "NCCL's maximum loses a NaN"


def factors_of_a_sum() -> None:
    for factor in (2.0 + RANK, torch.tensor([2.0 + RANK])):
        tensor = own()
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
        expected = sum((2 + rank) * (rank + 1) for rank in range(SIZE))
        assert (tensor == expected).all(), tensor


def every_movement() -> None:
    for dtype in DTYPES:
        ranks = torch.arange(1, SIZE + 1).to(dtype)
        for root in range(SIZE):
            tensor = own(dtype)
            dist.broadcast(tensor, root)
            assert (tensor == root + 1).all()
            rows = [torch.empty(5, dtype=dtype) for _ in range(SIZE)]
            dist.gather(own(dtype), rows if root == RANK else None, root)
            if root == RANK:
                assert torch.equal(torch.stack(rows)[:, 3], ranks)
            given = list(ranks.repeat(5, 1).t().contiguous())
            tensor = torch.empty(5, dtype=dtype)
            dist.scatter(tensor, given if root == RANK else None, root)
            assert (tensor == RANK + 1).all()
        rows = [torch.empty(5, dtype=dtype) for _ in range(SIZE)]
        dist.all_gather(rows, own(dtype))
        assert torch.equal(torch.stack(rows)[:, 3], ranks)
        whole = torch.empty(SIZE * 5, dtype=dtype)
        dist.all_gather_into_tensor(whole, own(dtype))
        assert torch.equal(whole.view(SIZE, 5)[:, 3], ranks)
        output = torch.empty(SIZE, dtype=dtype)
        dist.all_to_all_single(output, (ranks + RANK).contiguous())
        assert torch.equal(output, torch.arange(SIZE).to(dtype) + RANK + 1)
    dist.barrier()


def unequal_parts() -> None:
    """Rank r sends p + 1 elements to rank p."""
    given = torch.cat([torch.full((peer + 1,), RANK) for peer in range(SIZE)])
    output = torch.empty(SIZE * (RANK + 1), dtype=torch.int64)
    dist.all_to_all_single(output, given, [RANK + 1] * SIZE, list(range(1, SIZE + 1)))
    assert torch.equal(output, torch.arange(SIZE).repeat_interleave(RANK + 1))


def messages() -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    first, second = torch.empty(5), torch.empty(7)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, own(), after),
            dist.P2POp(dist.isend, own(length=7) * 10, after),
            dist.P2POp(dist.irecv, first, before),
            dist.P2POp(dist.irecv, second, before),
        ]
    )
    for work in works:
        work.wait()
    assert (first == before + 1).all()
    assert (second == 10 * (before + 1)).all()
    if RANK == 0:
        dist.send(own(), 1)
    elif RANK == 1:
        dist.recv(first, 0)
        assert (first == 1).all()


def streams_are_ordered() -> None:
    side = torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(side):
            tensor = torch.zeros(1000)
            torch.cuda._sleep(LONG // 10)
            tensor.add_(RANK + 1)
            work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert (tensor * 2 == 2 * TOTAL).all()


def many_at_once() -> None:
    tensors = [own(length=length) for length in range(1, 40)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    for work in works:
        work.wait()
    assert all((each == TOTAL).all() for each in tensors)
    with dist._coalescing_manager(async_ops=True) as manager:
        for each in tensors[:3]:
            dist.all_reduce(each)
    manager.wait()
    assert all((each == SIZE * TOTAL).all() for each in tensors[:3])


def groups_of_some_ranks() -> None:
    for members in ([0, 1], [SIZE - 1, 0], list(range(SIZE))):
        group = dist.new_group(members)
        if RANK in members:
            tensor = own()
            dist.all_reduce(tensor, group=group)
            assert (tensor == sum(each + 1 for each in set(members))).all()


def groups_are_divided() -> None:
    groups_of_some_ranks()
    halves = dist.split_group(split_ranks=[[0], list(range(1, SIZE))])
    assert halves is not None
    tensor = own()
    dist.all_reduce(tensor, group=halves)
    assert (tensor == (1 if RANK == 0 else TOTAL - 1)).all()


def data_parallel() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    alone = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    alone.load_state_dict(model.state_dict())
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=[RANK])
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)]
    for step in range(4):
        x = (torch.arange(SIZE * 4 * 6).view(SIZE, 4, 6) + step).sin()
        parallel(x[RANK]).square().mean().backward()
        alone(x.view(-1, 6)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def abort_ends_a_wait() -> None:
    """Rank 0 makes no call. Each other rank waits until it aborts."""
    warm = own()
    dist.all_reduce(warm)
    if RANK == 0:
        return
    tensor = own()
    work = dist.all_reduce(tensor, async_op=True)
    time.sleep(0.5)
    assert not work.is_completed(), "NCCL has not waited for rank 0"
    aborting = threading.Timer(0.5, dist.distributed_c10d._abort_process_group)
    aborting.start()
    begun = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - begun > 0.3
    aborting.join()  # `run_cases` would abort the group at the same time


def an_error_is_told() -> None:
    """After a network error no work completes, and NCCL's state has the error."""
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    dist.all_reduce(own())
    torch.cuda.synchronize()
    ctypes.CDLL(None).simgpu_fail_nccl(REMOTE_ERROR)
    work = dist.all_reduce(own(), async_op=True)
    end = time.monotonic() + 60
    while work.exception() is None and not work.is_completed():
        assert time.monotonic() < end, "torch was not told"
        time.sleep(0.05)
    backend.abort()


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        every_reduction,
        factors_of_a_sum,
        every_movement,
        unequal_parts,
        messages,
        streams_are_ordered,
        many_at_once,
        groups_of_some_ranks,
        groups_are_divided,
        data_parallel,
        abort_ends_a_wait,
        an_error_is_told,
    )
}
DIVIDING = frozenset({"groups_are_divided"})
ABORTING = frozenset({"abort_ends_a_wait", "an_error_is_told"})


def on_one_gpu() -> str:
    """The text of NCCL's error when two ranks use one GPU."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(Path(COMM.bcast(os.environ["TMPDIR"])) / "s"), SIZE)
    dist.init_process_group("nccl", store=store, rank=RANK, world_size=SIZE)
    try:
        dist.all_reduce(torch.ones(5, device="cuda"))
    except dist.DistBackendError as error:
        return str(error)
    return ""
