"""nbdist on simulated machines. `test_machines.py` runs this file on ranks."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import nbdist.collectives as nc
from nbdist.collectives import group as group_module
from nbdist.collectives.transports import nccl
from nbdist.config import CollectiveConfig
from nbdist.errors import CollectiveAborted, UsageError
from nbdist.training.data.device_prefetch import on_device

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
LONG = 100_000_000
"""Clock ticks: some 0.05 s."""
SLOT = 65_536
TOTAL = SIZE * (SIZE + 1) / 2


def on_machine(names: list[str], transport: str) -> tuple[str, dict[str, str | None]]:
    """The group's description, and the outcomes of cases of `collectives/gpu.py`."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "collectives"))
    import gpu

    return gpu.described(transport), gpu.run_cases(transport, names)


def run(case: str, own_gpus: bool) -> None:
    """One case."""
    torch.cuda.set_device(RANK if own_gpus else 0)
    config = CONFIGS.get(case, CollectiveConfig(timeout_s=30.0))
    group = nc.Group(COMM, config=config)
    nc.set_default_group(group)
    try:
        CASES[case]()
        torch.cuda.synchronize()
        COMM.Barrier()
    finally:
        nc.close_groups()


def calls_on_changing_streams() -> None:
    """Each call uses a slot that an earlier call on another stream still reads."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    tensors = []
    for step in range(150):
        with torch.cuda.stream(streams[step % 3]):
            tensor = torch.zeros(2000, device="cuda").add_(RANK + 1 + step)
            nc.all_reduce(tensor)
            tensors.append(tensor)
    torch.cuda.synchronize()
    for step, tensor in enumerate(tensors):
        assert (tensor == TOTAL + SIZE * step).all(), step


def many_small_pieces() -> None:
    """Tensors that go through the host in some hundred pieces."""
    numbers = torch.arange(100_000.0, device="cuda")
    for step in range(6):
        tensor = torch.zeros_like(numbers)
        torch.cuda._sleep(LONG // 5)
        tensor.add_(numbers + RANK + step)
        nc.all_reduce(tensor)
        doubled = tensor * 2
        tensor.zero_()
        expected = SIZE * numbers + TOTAL - SIZE + SIZE * step
        assert torch.equal(doubled, 2 * expected), step
        own = torch.zeros_like(numbers).add_(numbers * (RANK + 1) + step)
        rows = [torch.zeros_like(numbers) for _ in range(SIZE)]
        nc.all_gather(rows, own)
        for rank, row in enumerate(rows):
            assert torch.equal(row, numbers * (rank + 1) + step), (step, rank)


def late_messages() -> None:
    """A tensor is sent while the GPU has yet to compute it."""
    for step in range(10):
        tensor = torch.zeros(1000, device="cuda")
        if RANK == 0:
            torch.cuda._sleep(LONG // 5)
            tensor.add_(step + 1)
            nc.send(tensor, 1)
            tensor.zero_()
        elif RANK == 1:
            nc.recv(tensor, 0)
            assert (tensor == step + 1).all()


def messages_on_two_streams() -> None:
    """A part of a tensor is received on one stream and read on another one."""
    other = torch.cuda.Stream()
    for step in range(30):
        whole = torch.zeros(200, 200, device="cuda")
        torch.cuda.synchronize()
        if RANK == 0:
            nc.send(whole.add_(step + 1).t()[::2], 1)
        elif RANK == 1:
            nc.recv(whole.t()[::2], 0)
            with torch.cuda.stream(other):
                assert (whole.t()[::2] == step + 1).all(), step


def _pinned(count: int) -> list[torch.Tensor]:
    return [torch.full((10_000,), step + 1.0).pin_memory() for step in range(count)]


def batches_are_complete() -> None:
    """The step reads a batch that was copied on another stream."""
    for step, batch in enumerate(on_device(_pinned(100), torch.device("cuda", 0))):
        total = torch.zeros_like(batch).add_(batch)
        assert (total == step + 1).all(), step


class _Rows:
    """A batch that moves itself, as those of graphs and scenes do."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def to(self, *args: Any, **kwargs: Any) -> _Rows:
        return _Rows(self._rows.to(*args, **kwargs))

    def read(self) -> torch.Tensor:
        return self._rows


def batches_stay_as_they_are() -> None:
    """A step reads its batch late; the next batches are copied by then."""
    device = torch.device("cuda", 0)
    kinds: list[tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]]
    kinds = [
        (lambda rows: rows, lambda batch: batch),
        (lambda rows: {"x": [rows]}, lambda batch: batch["x"][0]),
        (_Rows, _Rows.read),
    ]
    for made, read in kinds:
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            totals = []
            with torch.cuda.stream(stream):
                for batch in on_device(map(made, _pinned(20)), device):
                    total = torch.zeros_like(read(batch))
                    torch.cuda._sleep(LONG)
                    total.add_(read(batch))
                    totals.append(total)
            torch.cuda.synchronize()
            for step, total in enumerate(totals):
                assert (total == step + 1).all(), (made, step)


class _Slow:
    """A batch that is on the GPU after a long kernel."""

    def to(self, device: torch.device, **_options: object) -> _Slow:
        with torch.cuda.device(device):
            torch.cuda._sleep(10 * LONG)
            self.moved = torch.cuda.current_stream().record_event()
        return self


def a_step_does_not_wait_for_the_next_batch() -> None:
    """Whichever device is current."""
    device = torch.device("cuda", RANK)
    for current in (RANK, 1 - RANK):
        with torch.cuda.device(current):
            first, second = _Slow(), _Slow()
            batches = on_device([first, second], device)
            next(batches)
            torch.cuda.current_stream(device).synchronize()
            assert first.moved.query()
            assert not second.moved.query()
            next(batches)


def results_outlive_an_aborted_group() -> None:
    """Its memory is used again while a stream has yet to read a result there."""
    side = torch.cuda.Stream()
    nc.all_reduce(torch.ones(3, device="cuda"))
    for _ in range(3):
        part = nc.default_group().new(list(range(SIZE)))
        assert part is not None
        nc.all_reduce(torch.ones(3, device="cuda"), group=part)
        transport: Any = part.transport("cuda")
        transport._pass = _followed_by_a_long_kernel(transport._pass)
        with torch.cuda.stream(side):
            tensor = torch.full((1000,), RANK + 1.0, device="cuda")
            nc.all_reduce(tensor, group=part)
        part.abort(CollectiveAborted("enough"))
        part.close()
        del part, transport
        COMM.Barrier()
        torch.cuda.ipc_collect()
        scratch = [torch.full((SLOT,), -1.0, device="cuda") for _ in range(8)]
        side.synchronize()
        assert (tensor == TOTAL).all()
        del scratch


def _followed_by_a_long_kernel(function: Callable[..., None]) -> Callable[..., None]:
    def followed(first: bool) -> None:
        function(first=first)
        torch.cuda._sleep(LONG)

    return followed


def another_current_device() -> None:
    """The group's GPU is that of its tensors, whichever device is current."""
    device = torch.device("cuda", RANK)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    torch.cuda.set_device(1 - RANK)
    groups = [
        nc.Group(COMM, config=CollectiveConfig(transport, timeout_s=30.0))
        for transport in ("nccl", "ipc", "staged")
    ]
    for group, is_async, length in itertools.product(
        groups, (False, True), (5, 300_000)
    ):
        tensor = torch.zeros(length, device=device)
        with torch.cuda.device(device):
            torch.cuda._sleep(LONG)
        tensor.add_(RANK + 1)
        handle = nc.all_reduce(tensor, async_op=is_async, group=group)
        if handle is not None:
            handle.wait()
        assert (tensor == TOTAL).all(), length
        nc.all_reduce(tensor, group=group)
        assert (tensor == SIZE * TOTAL).all(), length
        assert torch.cuda.current_device() == 1 - RANK
    for group in groups:
        with pytest.raises(UsageError, match="a tensor on cuda"):
            nc.all_reduce(torch.ones(3, device="cuda"), group=group)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        calls_on_changing_streams,
        many_small_pieces,
        late_messages,
        messages_on_two_streams,
        batches_are_complete,
        batches_stay_as_they_are,
        another_current_device,
        a_step_does_not_wait_for_the_next_batch,
        results_outlive_an_aborted_group,
    )
}
CONFIGS = {
    "results_outlive_an_aborted_group": CollectiveConfig(
        "ipc", timeout_s=30.0, gpu_slot_bytes=SLOT
    ),
    "many_small_pieces": CollectiveConfig("staged", timeout_s=30.0, staging_bytes=4096),
}


def nccl_closes_alone(case: str) -> None:
    """Rank 0 closes NCCL's transport, which rank 1 does not close."""
    torch.cuda.set_device(RANK)
    torch.cuda.synchronize()
    nccl._CLOSE_WITHIN_S = 1.0
    folder = Path(COMM.bcast(os.environ["TMPDIR"]))
    group = nc.Group(COMM)
    store = dist.FileStore(str(folder / "store"), SIZE)
    transport = nccl.NcclTransport(store, RANK, SIZE, group.transport("cpu"))
    transport.all_reduce_flat(torch.ones(5, device="cuda"), "sum")
    torch.cuda.synchronize()
    COMM.Barrier()
    if RANK == 0:
        if case == "unfinished":
            transport.all_reduce_flat(torch.ones(5, device="cuda"), "sum")
        transport.close()
    COMM.Barrier()
    transport.abort()
    group.close()


def nccl_is_aborted_together() -> list[str]:
    """How the transports end when the work of one rank waits for a rank in vain."""
    torch.cuda.set_device(RANK)
    group_module._FINISH_WITHIN_S = 1.0
    group = nc.Group(COMM, config=CollectiveConfig("nccl", timeout_s=30.0))
    nc.all_reduce(torch.ones(5, device="cuda"), group=group)
    torch.cuda.synchronize()
    transport = group.transport("cuda", "nccl")
    ended: list[str] = []
    transport._group = _Noting(transport._group, ended)
    if RANK == 0:  # as if rank 1 had died after the barrier, and was replaced
        transport.all_reduce_flat(torch.ones(5, device="cuda"), "sum")
    group.close()
    return ended


def nccl_store_outlives_its_maker() -> bool:
    """Rank 0, which has made the store of NCCL's ranks, closes before the others.

    A thread of NCCL in each other rank looks into the store once a second. Without the
    store's file it tries again for 300 s, and the end of the group waits for it.

    Returns:
        Whether the store is there after that.
    """
    torch.cuda.set_device(RANK)
    nccl._CLOSE_WITHIN_S = 1.0
    made: list[Any] = []

    def noting(path: str, size: int) -> Any:
        made.append((Path(path), dist.FileStore(path, size)))
        return made[-1][1]

    nccl.FileStore = noting  # type: ignore[assignment, misc]
    group = nc.Group(COMM, config=CollectiveConfig("nccl", timeout_s=30.0))
    nc.all_reduce(torch.ones(5, device="cuda"), group=group)
    torch.cuda.synchronize()
    ((path, _),) = made
    transport = group.transport("cuda", "nccl")
    COMM.Barrier()
    if RANK == 0:
        transport.close()
    COMM.Barrier()
    is_there = path.exists()
    if RANK > 0:
        time.sleep(2.5)  # NCCL's thread, which tells nobody, looks in the meantime
        transport.close()
    group.close()
    del transport, group
    made.clear()
    gc.collect()
    COMM.Barrier()
    return is_there


class _Noting:
    """A process group of which two calls are written down."""

    def __init__(self, group: Any, ended: list[str]) -> None:
        self._group, self._ended = group, ended

    def __getattr__(self, name: str) -> Any:
        if name in ("abort", "shutdown"):
            self._ended.append(name)
        return getattr(self._group, name)


def broken_context() -> str:
    """What a rank gets after one of its kernels has failed."""
    torch.cuda.set_device(0)
    tensor = torch.zeros(3, device="cuda")
    end = time.monotonic() + 20
    try:
        if RANK == 0:  # it may fail before this call of its kernel returns
            tensor[torch.tensor([7], device="cuda")] = 1
        while time.monotonic() < end:
            torch.cuda.synchronize()
            tensor.add_(1)
            if RANK > 0:
                return str(tensor.tolist() != [0, 0, 0])
    except RuntimeError as error:
        return str(error)
    return "no error"


def too_much_memory() -> list[str]:
    """Two ranks fill a GPU of 1 GiB, on which each has a context of 300 MiB."""
    torch.cuda.set_device(0)
    free, total = torch.cuda.mem_get_info()
    COMM.Barrier()
    found = [f"{free >> 20} of {total >> 20} MiB"]
    if RANK == 0:
        held = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
    COMM.Barrier()
    try:
        held = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
        found.append(f"{held.nbytes >> 20} MiB more")
    except torch.OutOfMemoryError as error:
        found.append(str(error))
    COMM.Barrier()
    return found
