"""nbdist on simulated machines. `test_machines.py` runs this file on ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mpi4py import MPI

import nbdist.collectives as nc
from nbdist.config import CollectiveConfig
from nbdist.training.data.device_prefetch import on_device

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
LONG = 100_000_000
"""Clock ticks: some 0.05 s."""
TOTAL = SIZE * (SIZE + 1) / 2


def on_machine(names: list[str], transport: str) -> tuple[str, dict[str, str | None]]:
    """The group's description, and the outcomes of cases of `collectives/gpu.py`."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "collectives"))
    import gpu

    return gpu.described(transport), gpu.run_cases(transport, names)


def run(case: str, own_gpus: bool) -> None:
    """One case."""
    torch.cuda.set_device(RANK if own_gpus else 0)
    group = nc.Group(COMM, config=CollectiveConfig(timeout_s=30.0))
    nc.set_default_group(group)
    try:
        CASES[case]()
        torch.cuda.synchronize()
        COMM.Barrier()
    finally:
        nc.close_groups()


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


def _pinned() -> list[torch.Tensor]:
    return [torch.full((50_000,), step + 1.0).pin_memory() for step in range(20)]


def batches_are_complete() -> None:
    """The step reads a batch that was copied on another stream."""
    for step, batch in enumerate(on_device(_pinned(), torch.device("cuda", 0))):
        total = torch.zeros_like(batch).add_(batch)
        assert (total == step + 1).all(), step


def batches_stay_as_they_are() -> None:
    """A step reads its batch late; the next batches are copied by then."""
    totals = []
    for batch in on_device(_pinned(), torch.device("cuda", 0)):
        total = torch.zeros_like(batch)
        torch.cuda._sleep(LONG)
        total.add_(batch)
        totals.append(total)
    for step, total in enumerate(totals):
        assert (total == step + 1).all(), step


def another_current_device() -> None:
    """The group's GPU is that of its tensors, whichever device is current."""
    device = torch.device("cuda", RANK)
    nc.all_reduce(torch.ones(3, device=device))
    torch.cuda.set_device(1 - RANK)
    for length in (5, 300_000):
        tensor = torch.zeros(length, device=device)
        with torch.cuda.device(device):
            torch.cuda._sleep(LONG)
        tensor.add_(RANK + 1)
        handle = nc.all_reduce(tensor, async_op=True)
        assert handle is not None
        handle.wait()
        assert (tensor == TOTAL).all(), length
        assert torch.cuda.current_device() == 1 - RANK


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        late_messages,
        messages_on_two_streams,
        batches_are_complete,
        batches_stay_as_they_are,
        another_current_device,
    )
}


def broken_context() -> str:
    """What a rank gets after one of its kernels has failed."""
    torch.cuda.set_device(0)
    tensor = torch.zeros(3, device="cuda")
    if RANK == 0:
        tensor[torch.tensor([7], device="cuda")] = 1
    end = time.monotonic() + 20
    try:
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
