"""Streams, events and memory of GPUs. `test_gpu.py` runs this file on ranks.

Long kernels are queued first, so that an operation that does not wait for them reads
old values.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contract
import pytest
import torch
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import FileStore

import nbdist.collectives as nc
from nbdist.collectives.sync import cuda_peers
from nbdist.collectives.transports.nccl import NcclTransport
from nbdist.config import CollectiveConfig
from nbdist.errors import CollectiveAborted, CollectiveTimeout

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
LONG = 200_000_000
"""Clock ticks: some 0.1 s."""
IS_SMALL = os.environ.get("SIMGPU_SMALL") == "1"
"""Whether slots and tensors are small, because the CPU runs the kernels."""
SLOT_BYTES = (1 if IS_SMALL else 16) * 2**20
LARGE = 1_000_000 if IS_SMALL else 20_000_000
"""Elements: more than one slot of device memory."""
TOTAL = SIZE * (SIZE + 1) / 2


def run_cases(
    transport: str, names: list[str], own_gpus: bool = False
) -> dict[str, str | None]:
    """Run the named cases over one transport. Returns this rank's errors, by case."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.cuda.set_device(RANK if own_gpus else 0)
    torch.set_default_device("cuda")
    outcomes = {}
    for name in names:
        COMM.Barrier()
        config = CollectiveConfig(transport, 30.0, gpu_slot_bytes=SLOT_BYTES)
        group = nc.Group(COMM, config=config)
        nc.set_default_group(group)
        try:
            warm = torch.ones(3)
            nc.all_reduce(warm)
            assert (warm == SIZE).all()
            CASES[name](group)
            torch.cuda.synchronize()
            outcomes[name] = None
        except BaseException:  # noqa: BLE001 - it is the outcome
            outcomes[name] = traceback.format_exc()
        COMM.Barrier()
        nc.close_groups()
    return outcomes


def late(length: int, scale: float = 1.0) -> Tensor:
    """A tensor of `scale * (rank + 1)`, which is computed after a long kernel."""
    tensor = torch.zeros(length)
    torch.cuda._sleep(LONG)
    return tensor.add_(scale * (RANK + 1))


# -- streams ---------------------------------------------------------------------------


def work_queued_before_and_after_is_ordered(group: nc.Group) -> None:
    for length in (5, 100_000, LARGE):
        tensor = late(length)
        nc.all_reduce(tensor)
        doubled = tensor * 2
        tensor.zero_()
        assert (doubled == 2 * TOTAL).all(), length


def a_stream_of_the_users(group: nc.Group) -> None:
    side = torch.cuda.Stream()
    for length in (5, LARGE):
        with torch.cuda.stream(side):
            tensor = late(length)
            nc.all_reduce(tensor)
            doubled = tensor * 2
        side.synchronize()
        assert (doubled == 2 * TOTAL).all(), length


def calls_on_many_streams(group: nc.Group) -> None:
    """The group alone orders the calls. Each call reuses the previous call's slots."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    results: list[tuple[int, Tensor]] = []
    for step in range(12):
        with torch.cuda.stream(streams[step % 3]):
            torch.cuda._sleep(LONG // 50 * (1 + (step + RANK) % 3))
            small = torch.full((1000,), RANK + 1.0 + step)
            large = torch.full((LARGE,), RANK + 1.0 + step)
            nc.all_reduce(small)
            nc.all_reduce(large)
        results += [(step, small), (step, large)]
    torch.cuda.synchronize()
    for step, result in results:
        assert (result == TOTAL + SIZE * step).all(), (step, len(result))


def asynchronous_calls(group: nc.Group) -> None:
    other = torch.cuda.Stream()
    for _ in range(6):  # a wait that is missing does not show each time
        tensors = [late(length, 1.0) for length in (5, 1000, LARGE, 7)]
        handles = [nc.all_reduce(each, async_op=True) for each in tensors]
        with torch.cuda.stream(other):
            for tensor, handle in zip(tensors, handles, strict=True):
                assert handle is not None
                handle.wait()
                assert (tensor * 2 == 2 * TOTAL).all(), len(tensor)


def memory_is_not_reused_too_early(group: nc.Group) -> None:
    """The memory of an asynchronous call is not reused before the call has ended."""
    for _ in range(20):
        whole = torch.zeros(64, 20_000).add_(RANK + 1)
        handle = nc.all_reduce(whole.t()[::2], async_op=True)  # on a copy
        scratch = [torch.full((64 * 10_000,), -1.0) for _ in range(4)]
        assert handle is not None
        handle.wait()
        assert (whole.t()[::2] == TOTAL).all()
        assert (whole.t()[1::2] == RANK + 1).all()
        assert all((each == -1).all() for each in scratch)


def calls_for_both_kinds_of_device_alternate(group: nc.Group) -> None:
    """The steps of the barrier and of the device are counted separately."""
    for step in range(30):
        on_host = torch.full((3,), RANK + 1.0, device="cpu")
        on_device = torch.full((1000 + step,), RANK + 1.0)
        for _ in range(step % 3):
            nc.barrier()
        nc.all_reduce(on_host)
        nc.all_reduce(on_device)
        assert (on_host == TOTAL).all()
        assert (on_device == TOTAL).all()
        nc.broadcast(on_device, step % SIZE)


def long_runs_of_small_calls(group: nc.Group) -> None:
    tensor = torch.zeros(77)
    for step in range(300):
        tensor.fill_(RANK + step)
        nc.all_reduce(tensor)
        assert tensor[76].item() == SIZE * step + TOTAL - SIZE


# -- releases --------------------------------------------------------------------------


def a_wait_for_a_busy_device_can_be_released(group: nc.Group) -> None:
    """The other ranks wait for one busy device, and are released."""
    for how in ("abort", "interrupt", "timeout"):
        if RANK == 0:
            busy = torch.cuda.Event()
            torch.cuda._sleep(30 * LONG)
            busy.record()
        COMM.Barrier()
        tensor = torch.ones(1000)
        if RANK == 0:
            with contextlib.suppress(CollectiveTimeout, CollectiveAborted):
                nc.all_reduce(tensor, timeout=1.0)  # over IPC this rank does not wait
        else:
            _leave(group, how, tensor)
        COMM.Barrier()
        if RANK == 0:
            assert not busy.query(), how
        group.renew(group.generation + 1)
        tensor = torch.ones(1000)
        nc.all_reduce(tensor)
        assert (tensor == SIZE).all(), how


def _leave(group: nc.Group, how: str, tensor: Tensor) -> None:
    main = threading.main_thread().ident or 0
    if how == "abort":
        error = CollectiveAborted("enough")
        threading.Timer(0.5, group.abort, [error]).start()
        expected: tuple[type[BaseException], ...] = (CollectiveAborted,)
    elif how == "interrupt":
        threading.Timer(0.5, signal.pthread_kill, [main, signal.SIGINT]).start()
        expected = (KeyboardInterrupt, CollectiveAborted)  # another rank's came first
    else:
        expected = (CollectiveTimeout, CollectiveAborted)
    with pytest.raises(expected):
        nc.all_reduce(tensor, timeout=0.5 if how == "timeout" else 20.0)
    if how == "interrupt":
        _let_it_come()


def _let_it_come() -> None:
    try:
        time.sleep(0.6)  # the signal of a rank that another rank has released
    except KeyboardInterrupt:
        return


# -- memory ----------------------------------------------------------------------------


def groups_are_closed_while_others_read(group: nc.Group) -> None:
    for _ in range(10):
        part = group.new(list(range(SIZE)))
        assert part is not None
        if RANK == SIZE - 1:
            torch.cuda._sleep(LONG)
        tensor = torch.full((LARGE,), RANK + 1.0)
        nc.all_reduce(tensor, group=part)
        part.close()
        del part
        assert (tensor == TOTAL).all()


def groups_release_their_memory(group: nc.Group) -> None:
    def use_one() -> None:
        part = group.new(list(range(SIZE)))
        assert part is not None
        nc.all_reduce(torch.ones(5), group=part)
        torch.cuda.synchronize()
        part.close()

    for _ in range(3):
        use_one()
    COMM.Barrier()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        use_one()
        COMM.Barrier()
    torch.cuda.ipc_collect()
    slots = 4 * SLOT_BYTES
    assert torch.cuda.memory_allocated() < before + 2 * slots


def memory_that_a_rank_cannot_open() -> None:
    """Its owner releases it."""
    torch.cuda.set_device(0)
    if RANK == SIZE - 1:
        cuda_peers._open = lambda handle: None
    size = 2**20
    for _ in range(5):
        assert cuda_peers.map_memories(size, RANK, COMM.allgather) is None
        COMM.Barrier()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() < 2 * size


class Lying:
    """An opened event that always gives one answer."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def query(self) -> bool:
        return self.answer


def events_that_lie(answer: bool) -> None:
    """Events of another process that do not tell when its work is done are not used."""
    torch.cuda.set_device(0)
    honest = cuda_peers._open_handles

    def open_lying(*arguments: Any) -> Any:
        opened = honest(*arguments)
        if RANK == 0:
            return [(Lying(answer), Lying(answer)) for _ in opened or ()]
        return opened

    for opening in (open_lying, honest):
        cuda_peers._open_handles = opening
        found = cuda_peers.open_events(RANK, COMM.allgather)
        assert (found is None) == (opening is open_lying)
        if found is not None:
            cuda_peers.keep_events(found[0])
        COMM.Barrier()


CASES: dict[str, Callable[[nc.Group], None]] = {
    case.__name__: case
    for case in (
        work_queued_before_and_after_is_ordered,
        a_stream_of_the_users,
        calls_on_many_streams,
        asynchronous_calls,
        memory_is_not_reused_too_early,
        calls_for_both_kinds_of_device_alternate,
        long_runs_of_small_calls,
        a_wait_for_a_busy_device_can_be_released,
        groups_are_closed_while_others_read,
        groups_release_their_memory,
    )
}


# -- without other ranks ---------------------------------------------------------------


def described(transport: str) -> str:
    """A group's description of its transports, after a GPU tensor was sent."""
    torch.cuda.set_device(0)
    group = nc.Group(COMM, config=CollectiveConfig(transport))
    nc.all_reduce(torch.ones(3, device="cuda"), group=group)
    text = group.describe()
    group.close()
    return text


def nccl_alone() -> None:
    """Every operation of NCCL in a world of one rank, for which one GPU is enough."""
    torch.set_default_device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(str(Path(folder) / "store"), 1)
        nccl = NcclTransport(store, 0, 1, _Unused())
        for dtype in contract.DTYPES:
            given = contract.input_of((11,), dtype, 0)
            for op in ("sum", "product", "min", "max"):
                if op in ("min", "max") and dtype.is_complex:
                    continue
                if dtype == torch.int16 or (dtype.is_complex and op == "product"):
                    continue  # staged
                tensor = given.clone()
                nccl.all_reduce(tensor, op)
                assert torch.equal(tensor, given), (op, dtype)
            _move(nccl, given)
        nan = torch.tensor([1.0, float("nan")])
        nccl.all_reduce(nan, "max")
        assert nan.isnan().tolist() == [False, True]
        nccl.finish(lambda: None)
        nccl.close()
        nccl = NcclTransport(FileStore(folder + "/second", 1), 0, 1, _Unused())
        nccl.all_reduce(torch.ones(3), "sum")
        nccl.abort()
        nccl.close()


def _move(nccl: NcclTransport, given: Tensor) -> None:
    room = torch.empty_like(given)
    nccl.broadcast(given, 0)
    nccl.all_gather([room], given)
    assert torch.equal(room, given)
    nccl.gather([room.zero_()], given, 0)
    assert torch.equal(room, given)
    nccl.scatter(room.zero_(), [given], 0)
    assert torch.equal(room, given)
    nccl.all_to_all([room.zero_()], [given], len(given))
    assert torch.equal(room, given)


class _Unused(nc.Transport):
    """A transport that the test must not use."""


_Unused.__abstractmethods__ = frozenset()
