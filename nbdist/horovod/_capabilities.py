"""What Horovod was built with, as scripts ask; here, what nbdist can use."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built() -> bool:
    """Whether MPI can be used: always, for the ranks meet by it."""
    return True


def mpi_enabled() -> bool:
    """Whether MPI is used: always."""
    return True


def mpi_threads_supported() -> bool:
    """Whether other code may use MPI from any thread meanwhile."""
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def gloo_built() -> bool:
    """Whether torch.distributed has gloo. nbdist's own transports take its place."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether gloo carries these collectives: never."""
    return False


def nccl_built() -> int:
    """NCCL's version as Horovod counts it (22304 for 2.23.4); 0 where there is none."""
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
