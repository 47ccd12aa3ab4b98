"""Horovod's functions with CUDA tensors. `test_clusters.py` runs this file on ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "horovod"))

import functions


def run_all_cases(own_gpus: bool) -> dict[str, str | None]:
    """All cases of `tests/horovod`, whose tensors are on this rank's GPU."""
    from mpi4py import MPI

    torch.cuda.set_device(MPI.COMM_WORLD.rank if own_gpus else 0)
    torch.set_default_device("cuda")
    functions.input_of = _on_gpu(functions.input_of)
    return functions.run_all_cases()


def _on_gpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make`, whose generator of random numbers is the CPU's."""

    def made(*args: object, **kwargs: object) -> Tensor:
        with torch.device("cpu"):
            tensor = make(*args, **kwargs)
        return tensor.cuda()

    return made
