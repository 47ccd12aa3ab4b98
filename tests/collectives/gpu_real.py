"""What depends on a real GPU's speed and driver. `test_gpu_real.py` runs this."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nbdist.collectives as nc
from nbdist.collectives.torch_backend.registration import register
from nbdist.config import CollectiveConfig
from nbdist.errors import UsageError

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
MIB = 2**20


def begin(own_gpus: bool, transport: str = "auto") -> nc.Group:
    """A world on GPUs, with a default process group."""
    torch.cuda.set_device(RANK if own_gpus else 0)
    torch.set_default_device("cuda")
    group = nc.Group(COMM, config=CollectiveConfig(transport, timeout_s=60.0))
    nc.set_default_group(group)
    register()
    folder = COMM.bcast(tempfile.mkdtemp(prefix="nbdist-test-") if RANK == 0 else "")
    store = dist.FileStore(str(Path(folder) / "store"), SIZE)
    dist.init_process_group("nbdist", store=store, rank=RANK, world_size=SIZE)
    return group


def speeds() -> dict[str, float]:
    """Seconds of an all-reduce of 64 MiB on one GPU, by way; and of a copy."""
    group = begin(own_gpus=False)
    gloo = dist.new_group(backend="gloo")
    tensor = torch.ones(16 * MIB)
    target = torch.empty_like(tensor)
    ways = {
        "nbdist": lambda: nc.all_reduce(tensor, "max", group=group),
        "gloo": lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=gloo),
        "copy": lambda: target.copy_(tensor),
    }
    return {name: _best(way) for name, way in ways.items()}


def _best(call: Callable[[], object]) -> float:
    """Seconds of one call: the slowest rank's, in the best of several."""
    call()
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        COMM.Barrier()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        best = min(best, COMM.allreduce(time.perf_counter() - begun, MPI.MAX))
    return best


def a_captured_graph() -> None:
    """A collective of NCCL is captured in a CUDA graph, and repeated with it."""
    begin(own_gpus=True)
    tensor = torch.ones(1000)
    nc.all_reduce(tensor)  # connects the ranks before the capture
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        nc.all_reduce(tensor)
    tensor.fill_(RANK + 1.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (tensor == SIZE * (SIZE + 1) / 2).all()


def a_refused_capture() -> None:
    """The host takes part in CUDA IPC: a capture is refused, and spoils nothing."""
    group = begin(own_gpus=False)
    tensor = torch.ones(1000)
    for reason in ("make one before the capture", "over CUDA IPC, in which the host"):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(UsageError, match=reason), torch.cuda.graph(graph):
            nc.all_reduce(tensor, group=group)
        tensor.fill_(RANK + 1.0)
        nc.all_reduce(tensor)
        assert (tensor == SIZE * (SIZE + 1) / 2).all()


def sums_are_right() -> str:
    """Sums of tensors of several lengths; the group's description."""
    group = begin(own_gpus=False)
    for length in (5, 100_000, 20 * MIB):
        tensor = torch.full((length,), RANK + 1.0)
        nc.all_reduce(tensor)
        assert (tensor == SIZE * (SIZE + 1) / 2).all(), length
    return group.describe()


def a_compiled_model() -> float:
    """DDP of a compiled convolution in bfloat16: the greatest difference of weights."""
    begin(own_gpus=False)
    torch.manual_seed(RANK)
    head = nn.Linear(16 * 14 * 14, 5)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), head)
    images = torch.randn(8, 3, 16, 16)
    replica = DistributedDataParallel(model)
    compiled = torch.compile(replica)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(images).square().mean()
        loss.backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    rows = [torch.empty_like(weights) for _ in range(SIZE)]
    nc.all_gather(rows, weights)
    return max(float((row - rows[0]).abs().max()) for row in rows)
