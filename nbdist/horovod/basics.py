"""Horovod's basic functions: start and end, ranks, and available libraries."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nbdist
from nbdist.collectives import default_group
from nbdist.errors import WrongProcess
from nbdist.horovod import process_sets as sets
from nbdist.horovod import timeline
from nbdist.horovod.process_sets import ProcessSet, add_process_set

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


# -- start and end ---------------------------------------------------------------------


def init(
    comm: Sequence[int] | Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Join the world: a notebook's cluster, or that of `mpiexec` or `torchrun`.

    Every rank must call. A repeated call does nothing unless the ranks have changed.

    Args:
        comm: The world ranks to use, or an mpi4py communicator over them. Default: all.
        process_sets: Process sets to add. "dynamic" has no effect.

    Raises:
        WrongProcess: No launcher or cluster has started this process as a rank.
    """
    nbdist.init()
    if sets.is_begun():
        return
    sets.end()
    ranks = comm if comm is None or isinstance(comm, Sequence) else _ranks_of(comm)
    sets.begin(default_group(), ranks or None)
    if process_sets is not None and not isinstance(process_sets, str):
        for each in process_sets:
            add_process_set(each)
    path = os.environ.get("HOROVOD_TIMELINE")
    if path and path != "DYNAMIC" and timeline.running() is None:
        start_timeline(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES") == "1")


def _ranks_of(comm: Any) -> list[int]:
    members = comm.group
    own: list[int] = members.Translate_ranks(None, default_group().comm.group)
    return own


def shutdown() -> None:
    """Leave the world. Calls under way end with an error. Safe to call twice."""
    sets.end()
    timeline.stop()


def is_initialized() -> bool:
    """Whether `init` was called and the ranks have not changed since then."""
    try:
        default_group()
    except WrongProcess:
        return False
    return sets.is_begun()


# -- ranks -----------------------------------------------------------------------------


def rank() -> int:
    """This process's number, 0 to `size() - 1`.

    Raises:
        UsageError: `init` was not called. All functions for ranks raise this.
    """
    return sets.members().rank


def size() -> int:
    """The number of ranks."""
    return sets.members().size


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return _neighbours().index(rank())


def local_size() -> int:
    """The number of ranks on this host."""
    return len(_neighbours())


def cross_rank() -> int:
    """This host's number among the hosts that have a rank with this local rank."""
    return _peers().index(rank())


def cross_size() -> int:
    """The number of hosts that have a rank with this local rank."""
    return len(_peers())


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    hosts = _hosts()
    return len({hosts.count(host) for host in hosts}) == 1


def _hosts() -> tuple[int, ...]:
    return sets.members().hosts


def _neighbours() -> list[int]:
    hosts = _hosts()
    return [peer for peer, host in enumerate(hosts) if host == hosts[rank()]]


def _peers() -> list[int]:
    """The ranks with this rank's local rank, at most one of each host."""
    hosts, local = _hosts(), local_rank()
    found = []
    for peer, host in enumerate(hosts):
        if hosts[:peer].count(host) == local:
            found.append(peer)
    return found


# -- the timeline ----------------------------------------------------------------------


def start_timeline(
    file_path: str | os.PathLike[str], mark_cycles: bool = False
) -> None:
    """Write a trace of rank 0's calls from now on. Perfetto shows the file.

    A call has two spans: `NEGOTIATE_ALLREDUCE`, for instance, from its submission until
    all ranks have made it, and `ALLREDUCE`. A reduction whose ranks share memory waits
    for them within the second one. On the other ranks this does nothing. A timeline
    that is being written ends. `init` starts the one that $HOROVOD_TIMELINE names.

    Args:
        file_path: The file. One that exists is replaced.
        mark_cycles: Whether to mark the turns of the thread that makes the calls.

    Raises:
        UsageError: `init` was not called, or rank 0 cannot write the file.
    """
    if rank() == 0:
        timeline.start(Path(file_path), mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """End the timeline. Safe to call without one. `shutdown` calls this too."""
    timeline.stop()


# -- available libraries ---------------------------------------------------------------


def mpi_built() -> bool:
    """Whether MPI can be used: always, because nbdist's ranks use MPI."""
    return True


def mpi_enabled() -> bool:
    """Whether MPI is used: always."""
    return True


def mpi_threads_supported() -> bool:
    """Whether any thread may call MPI at any time (MPI_THREAD_MULTIPLE)."""
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def gloo_built() -> bool:
    """Whether torch.distributed has gloo, which nbdist does not use."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether gloo carries these collectives: never."""
    return False


def nccl_built() -> int:
    """NCCL's version as Horovod counts it (22304 for 2.23.4); 0 without NCCL."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Whether IBM's DDL can be used: never."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL can be used: never."""
    return False
