"""What a rank's code asks of its own process."""

from __future__ import annotations

from typing import SupportsIndex

import torch

from nbdist.engine.rank import this_rank

__all__ = ["device", "local_rank", "log", "rank", "size"]


def rank() -> int:
    """This process's number in the world, 0 to size() - 1."""
    return this_rank().info.rank


def size() -> int:
    """The number of ranks in the world."""
    return this_rank().info.world_size


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return this_rank().info.local_rank


def device() -> torch.device:
    """The device this rank is pinned to."""
    return torch.device(this_rank().info.device)


def log(step: SupportsIndex | None = None, **scalars: object) -> None:
    """Record scalars of this rank, such as `log(loss=loss)`; they appear live.

    Costs microseconds and never waits for the notebook. Values are numbers, 0-d
    tensors of any device, or numpy scalars; a CUDA tensor is not waited for.

    Args:
        step: Place on the x axis; counted from 0 when not given.
    """
    this_rank().recorder.log(step, **scalars)
