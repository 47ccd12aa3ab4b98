"""The process group of a script that was written for torchrun, in a world that runs.

Its environment is torchrun's, see `nbdist.engine.roles`. Its `dist.init_process_group`
gets the default group that is there already. That group's collectives can be
interrupted and released, which those of gloo and NCCL cannot; and where each rank owns
a GPU they are NCCL's anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbdist.errors import UsageError

__all__ = ["lent_group"]

LENT_FOR = {"gloo", "nccl", "mpi", "ucc", "nbdist"}
"""Backends in place of which the world's own group serves."""


@contextmanager
def lent_group(*, keep: bool) -> Iterator[None]:
    """Within, `dist.init_process_group` gives the world's group, which nobody destroys.

    Args:
        keep: leave the groups of some ranks that were made within; else they end.
    """
    before = set(c10d._world.pg_map)
    originals = c10d.init_process_group, c10d.destroy_process_group
    _install(_lend, _spare)
    try:
        yield
    finally:
        _install(*originals)
        if not keep:
            for group in set(c10d._world.pg_map) - before:
                dist.destroy_process_group(group)


def _install(init: Any, destroy: Any) -> None:
    for module in (dist, c10d):
        module.init_process_group = init  # type: ignore[attr-defined]
        module.destroy_process_group = destroy  # type: ignore[attr-defined]


_init, _destroy = c10d.init_process_group, c10d.destroy_process_group


def _lend(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    *args: Any,
    **options: Any,
) -> None:
    """In place of `dist.init_process_group`.

    Raises:
        UsageError: the script asks for another world than this one.
    """
    if not dist.is_initialized() or not _is_lent_for(backend):
        _init(backend, init_method, timeout, world_size, rank, *args, **options)
        return
    here = dist.get_rank(), dist.get_world_size()
    if world_size not in (-1, here[1]) or rank not in (-1, here[0]):
        raise UsageError(
            f"init_process_group(rank={rank}, world_size={world_size}) on rank "
            f"{here[0]} of {here[1]}: leave both out, or take them from the "
            "environment's RANK and WORLD_SIZE; %dist_scale changes the world"
        )


def _is_lent_for(backend: str | None) -> bool:
    """Whether ours serves for "nccl", or for each part of "cpu:gloo,cuda:nccl"."""
    parts = (backend or "nbdist").lower().split(",")
    return all(part.rpartition(":")[2] in LENT_FOR for part in parts)


def _spare(group: dist.ProcessGroup | None = None) -> None:
    """In place of `dist.destroy_process_group`: the world's own group stays."""
    if group is not None and group is not dist.group.WORLD:
        _destroy(group)
