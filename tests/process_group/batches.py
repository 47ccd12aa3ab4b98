"""Messages of CUDA tensors in one batch. Each rank sends before it receives."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from default_process_groups import meet, process_group
from mpi4py import MPI


def exchange(own_gpus: bool) -> None:
    """Send around a ring, in batches of messages that are larger than any buffer."""
    world = MPI.COMM_WORLD
    torch.cuda.set_device(world.rank if own_gpus else 0)
    backend = "cpu:nbdist,cuda:nccl" if own_gpus else "nbdist"
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.bcast(own))
        with process_group(folder / "store", backend):
            for length in (1, 10_000_000):
                tensor = torch.full((length,), float(world.rank), device="cuda")
                room = torch.empty(length, device="cuda")
                messages = [
                    dist.P2POp(dist.isend, tensor, right),
                    dist.P2POp(dist.irecv, room, left),
                ]
                for work in dist.batch_isend_irecv(messages):
                    work.wait()
                assert (room == left).all()
        meet()  # the folder is shared
