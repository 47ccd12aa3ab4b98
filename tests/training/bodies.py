"""What the ranks of the tests in this folder do; see tests/collectives/ranks.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from nbdist.collectives import Group, barrier, set_default_group
from nbdist.errors import SaveError
from nbdist.training import files


def join() -> Group:
    """The default group of this world."""
    group = Group(MPI.COMM_WORLD.Dup())
    set_default_group(group)
    return group


def save_and_load(folder: str) -> dict[str, Any]:
    """Save, load and fail to save; what this rank has seen of each."""
    rank = join().rank
    path = Path(folder) / "model.pt"
    files.save({"rank": rank, "weight": torch.full((3,), float(rank))}, path)
    there = path.exists()
    barrier()
    reasons = []
    for bad in ("missing/model.pt", "model.pt"):
        try:  # the second time, on rank 0, of what cannot be pickled
            files.save(None if bad != "model.pt" else lambda: None, path.parent / bad)
        except SaveError as error:
            reasons.append(str(error))
    return {
        "there": there,
        "loaded": files.load(path),
        "reasons": reasons,
        "left": sorted(os.listdir(folder)),
    }
