"""Prepares the process for MPI, and decides when MPI is initialised.

The import of mpi4py initialises it, except under torchrun. There `nbdist.init()` makes
a process a rank of MPI.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

import mpi4py

from nbdist.ipc.launch_environment import is_launched_by_mpi, is_launched_by_torchrun

KNOWN = "Open MPI v5.0."
"""The beginning of the versions whose functions `_late_revocation.c` replaces."""
_TRANSPORTS = "OMPI_MCA_btl"


def _load_before_open_mpi(name: str) -> None:
    """Load a compiled module, if there is one, whose functions replace Open MPI's."""
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_GLOBAL)
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module(f"nbdist.collectives.{name}")
    finally:
        sys.setdlopenflags(flags)


def unknown_version(library: str) -> str:
    """A sentence for the user if `_late_revocation` leaves an Open MPI alone.

    Args:
        library: MPI's description of itself.
    """
    if not library.startswith("Open MPI v") or library.startswith(KNOWN):
        return ""
    version = library.split(",")[0]
    return (
        f"{version} is no version that nbdist knows ({KNOWN}x): if a rank dies while "
        "others join, all ranks may end"
    )


def _initialize_alone() -> None:
    """Initialise MPI in a process that no launcher has started.

    In such a process, Open MPI makes a file of 16 MB in /dev/shm for other ranks, and
    leaves it there at the end. Without its shared-memory transport it makes no file.
    """
    if "mpi4py.MPI" in sys.modules or _TRANSPORTS in os.environ:
        return
    os.environ[_TRANSPORTS] = "^sm"
    try:
        import mpi4py.MPI  # noqa: F401 - its import initialises MPI
    finally:
        del os.environ[_TRANSPORTS]  # not for a launcher that this process starts


_load_before_open_mpi("_late_revocation")
_load_before_open_mpi("_launchers_user")
# mpi4py's fast reductions use a communicator of its own, which cannot be revoked.
mpi4py.rc(fast_reduce=False)
if is_launched_by_torchrun():
    mpi4py.rc(initialize=False, finalize=False)
elif not is_launched_by_mpi():
    _initialize_alone()
