"""The functions of `nbdist` for one rank: `rank()`, `size()`, `device()`, `log()`."""

from __future__ import annotations

from typing import SupportsIndex

import torch
from mpi4py import MPI

from nbdist.engine import world
from nbdist.engine.rank import is_rank, this_rank
from nbdist.training.device import own_device

__all__ = ["comm", "device", "local_rank", "log", "rank", "size"]


def rank() -> int:
    """The number of this rank in the world, 0 to size() - 1."""
    return world.current().rank


def size() -> int:
    """The number of ranks in the world."""
    return world.current().size


def local_rank() -> int:
    """The number of this rank among the ranks of its host."""
    return world.current().local_rank


def device() -> torch.device:
    """The device of this rank: its GPU if it has one, otherwise the CPU."""
    if is_rank():
        return torch.device(this_rank().info.device)
    return own_device()


def comm() -> MPI.Intracomm:
    """An mpi4py communicator over all ranks, for your own calls of MPI.

    It belongs to one generation of the world. After an interrupt, or a change of the
    ranks, the old communicator raises and this function returns the new one. It must
    not be freed.
    """
    shared: MPI.Intracomm = world.current().shared
    return shared


def log(
    step: SupportsIndex | None = None,
    *,
    total: SupportsIndex | None = None,
    **scalars: object,
) -> None:
    """Record scalars of this rank, such as `log(loss=loss)`; they appear live.

    Costs microseconds and never waits for the notebook. In a script, it does nothing.

    Args:
        step: Position on the x axis; by default the last one plus one, from 0 on.
        total: The number of steps of the training. Once it is given in a cell, the
            monitor shows the remaining time; steps count from 0.
        scalars: Numbers, numpy scalars, or 0-d tensors of any device. A CUDA tensor is
            copied without waiting for it.
    """
    if is_rank():
        this_rank().recorder.log(step, total=total, **scalars)
