"""Where this process runs: read and applied before torch or MPI is imported."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Assignment"]


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
