"""Where this process runs: read and applied before torch or MPI is imported."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Assignment", "launched_local_rank", "launched_rank"]

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
LOCAL_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID",
)  # fmt: skip


def _first(variables: tuple[str, ...]) -> int | None:
    found = (os.environ[name] for name in variables if name in os.environ)
    return next((int(value) for value in found), None)


def launched_rank() -> int:
    """The rank that the MPI launcher gave this process; known before MPI_Init."""
    rank = _first(RANK_VARIABLES)
    if rank is None:
        raise RuntimeError(f"not started by an MPI launcher: none of {RANK_VARIABLES}")
    return rank


def launched_local_rank() -> int | None:
    """The rank among those of this host, where the launcher says it."""
    return _first(LOCAL_RANK_VARIABLES)


@dataclass(frozen=True)
class Assignment:
    """One entry of RUN_DIR/places.json: what the notebook decided for a rank."""

    rank: int
    gpu_uuid: str | None
    gpu_name: str
    shares_gpu: bool
    memory_fraction: float | None
    threads: int

    @classmethod
    def read(cls, run_dir: Path, rank: int) -> Assignment:
        places = json.loads((run_dir / "places.json").read_text(encoding="utf-8"))
        return cls(**places[rank])

    def pin(self) -> None:
        """Show CUDA this rank's device alone, and bound the thread pools."""
        os.environ["CUDA_VISIBLE_DEVICES"] = self.gpu_uuid or ""
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        os.environ["MKL_NUM_THREADS"] = str(self.threads)
