"""When MPI is initialised: by the import of mpi4py, but not under torchrun.

A process of torchrun's becomes a rank of MPI's in `nbdist.init()`.
"""

from __future__ import annotations

import os
import sys

import mpi4py

from nbdist.ipc.launch_environment import is_launched_by_mpi, is_launched_by_torchrun

_TRANSPORTS = "OMPI_MCA_btl"


def _initialize_alone() -> None:
    """Initialise MPI in a process that no launcher has started.

    There, Open MPI leaves the 16 MB that it would share with other ranks in /dev/shm
    when the process ends. Without its shared-memory transport it makes none.
    """
    if "mpi4py.MPI" in sys.modules or _TRANSPORTS in os.environ:
        return
    os.environ[_TRANSPORTS] = "^sm"
    try:
        import mpi4py.MPI  # noqa: F401 - its import initialises MPI
    finally:
        del os.environ[_TRANSPORTS]  # not for a launcher that this process starts


if is_launched_by_torchrun():
    mpi4py.rc(initialize=False, finalize=False)
elif not is_launched_by_mpi():
    _initialize_alone()
