"""torch.distributed on a rank, initialised before the user's first cell."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore
from torch.distributed import distributed_c10d

from nbdist.collectives import default_group
from nbdist.collectives.torch_backend.process_group import register
from nbdist.engine import shared_default_group
from nbdist.ipc.private_files import rendezvous_folder

__all__ = ["abort", "groups_made", "number_alike", "start", "stop"]

# A collective that waits is released by its peers' failure, not by a clock.
NO_TIMEOUT = timedelta(days=7)

_at_start = 0


def start(run_dir: Path, owns_gpu: bool, generation: int = 0) -> None:
    """Initialise the default process group, and share it. Every rank must call.

    The ranks meet through a file in the cluster's folders, which opens no port.

    Args:
        run_dir: The cluster's folder.
        owns_gpu: Whether each rank has a GPU for itself, so that NCCL can be used.
        generation: The world's. The ranks of each meet through a file of its own.
    """
    global _at_start
    register()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # for groups of the user's
    group = default_group()
    folder = rendezvous_folder(run_dir)
    seconds = group.config.timeout_s
    shared_default_group.make(
        "cpu:nbdist,cuda:nccl" if owns_gpu else "nbdist",
        store=FileStore(str(folder / f"torch-store-{generation}"), group.size),
        rank=group.rank,
        world_size=group.size,
        timeout=NO_TIMEOUT if seconds is None else timedelta(seconds=seconds),
    )
    _at_start = distributed_c10d._world.group_count


def groups_made() -> int:
    """How many groups this rank has made since the default one.

    Torch numbers the groups on each rank by itself, and the members of a gloo or NCCL
    group find each other by its number. Ranks whose counts differ wait without end.
    """
    return distributed_c10d._world.group_count - _at_start


def number_alike(comm: Any) -> None:
    """Set the count of groups to the highest of all ranks. Every rank must call.

    Args:
        comm: An mpi4py communicator over all ranks.
    """
    from mpi4py import MPI

    here = distributed_c10d._world
    here.group_count = comm.allreduce(here.group_count, MPI.MAX)


def abort() -> bool:
    """Release this rank from NCCL's collectives; any thread may call.

    Returns:
        Whether there were NCCL groups. They cannot be used any more, on any rank.
    """
    aborted = False
    # Torch's own function that aborts all groups also forgets those of other backends.
    for group in list(distributed_c10d._world.pg_names):
        with contextlib.suppress(RuntimeError):  # a group without CUDA
            backend: Any = group._get_backend(torch.device("cuda"))
            if backend.name() == "nccl":
                backend.abort()
                aborted = True
    return aborted


def stop() -> None:
    """Destroy every process group, whoever made it. Waits for no other rank."""
    shared_default_group.give_up()
