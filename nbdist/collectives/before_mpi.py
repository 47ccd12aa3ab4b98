"""When MPI begins: with the import of mpi4py, but not under torchrun.

There, a process is no rank of MPI's until `nbdist.init()` has found it a place.
"""

from __future__ import annotations

import os
import sys

import mpi4py

__all__ = ["launched_without_mpi"]

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TRANSPORTS = "OMPI_MCA_btl"
_OF_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def launched_without_mpi() -> bool:
    """Whether torchrun, or one that sets what it sets, has started this process."""
    by_torchrun = all(name in os.environ for name in _OF_TORCHRUN)
    return by_torchrun and not _launched_by_mpi()


def _launched_by_mpi() -> bool:
    return any(name in os.environ for name in _OF_MPI)


def _start_alone() -> None:
    """Start MPI in a process that no launcher has started.

    There, Open MPI leaves the 16 MB that it would share with other ranks in /dev/shm
    when the process ends. It has none to share with.
    """
    if "mpi4py.MPI" in sys.modules or _TRANSPORTS in os.environ:
        return
    os.environ[_TRANSPORTS] = "^sm"
    try:
        import mpi4py.MPI  # noqa: F401 - its import starts MPI
    finally:
        del os.environ[_TRANSPORTS]  # not for a launcher that this process starts


if launched_without_mpi():
    mpi4py.rc(initialize=False, finalize=False)
elif not _launched_by_mpi():
    _start_alone()
