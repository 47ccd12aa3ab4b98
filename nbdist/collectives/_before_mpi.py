"""When MPI begins: with the import of mpi4py, but not under torchrun.

There, a process is no rank of MPI's until `nbdist.init()` has found it a place.
"""

from __future__ import annotations

import os

import mpi4py

__all__ = ["launched_without_mpi"]

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def launched_without_mpi() -> bool:
    """Whether torchrun, or one that sets what it sets, has started this process."""
    by_torchrun = all(name in os.environ for name in _OF_TORCHRUN)
    return by_torchrun and not any(name in os.environ for name in _OF_MPI)


if launched_without_mpi():
    mpi4py.rc(initialize=False, finalize=False)
