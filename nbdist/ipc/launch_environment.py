"""Reads a launcher's environment variables, before MPI is initialised."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = [
    "is_launched_by_mpi",
    "is_launched_by_torchrun",
    "launched_rank",
    "launched_size",
]

MPI_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Set by Open MPI, by MPICH and Intel MPI, by a PMIx launcher, and by Slurm's srun."""
MPI_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Set by Open MPI, by MPICH and Intel MPI, and by Slurm's srun."""
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched_by_mpi() -> bool:
    """Whether an MPI launcher has started this process."""
    return any(name in os.environ for name in MPI_RANK_VARIABLES)


def is_launched_by_torchrun() -> bool:
    """Whether torchrun, and no MPI launcher, has started this process.

    A process that an MPI launcher has started may also have torchrun's variables.
    """
    by_torchrun = all(name in os.environ for name in TORCHRUN_VARIABLES)
    return by_torchrun and not is_launched_by_mpi()


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The rank that the MPI launcher gave a process.

    Args:
        environment: The environment of the process. Default: that of this process.

    Raises:
        RuntimeError: No MPI launcher has started this process.
    """
    for name in MPI_RANK_VARIABLES:
        if name in environment:
            return int(environment[name])
    raise RuntimeError(
        f"no MPI launcher has started this process: none of "
        f"{', '.join(MPI_RANK_VARIABLES)} is set"
    )


def launched_size(environment: Mapping[str, str]) -> int | None:
    """The number of ranks that the MPI launcher has started; None if it is not known.

    Args:
        environment: The environment variables of one of these ranks.
    """
    for name in MPI_SIZE_VARIABLES:
        if name in environment:
            return int(environment[name])
    return None
