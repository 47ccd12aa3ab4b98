"""torch.distributed on a rank: initialised before the user's first cell."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["start"]

# A collective that waits is released by its peers' failure, not by a clock.
NO_TIMEOUT = timedelta(days=7)


def start(run_dir: Path, owns_gpu: bool) -> None:
    """Initialise the default process group. Every rank must call.

    The ranks meet through a file in `run_dir`, so that no port is opened for it.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch._C._distributed_c10d.FileStore(str(run_dir / "torch-store"), size)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if owns_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=NO_TIMEOUT,
        device_id=torch.device("cuda:0") if owns_gpu else None,
    )
