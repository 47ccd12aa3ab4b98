"""What a script that was written for torchrun finds, and does, in a world that runs.

Its environment is torchrun's. Its `dist.init_process_group` gets the default group that
is there already: that group's collectives can be interrupted and released, which those
of gloo and NCCL cannot, and where each rank owns a GPU they are NCCL's anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbdist.errors import UsageError

__all__ = ["environment", "lent_group", "role"]

LENT_FOR = {"gloo", "nccl", "mpi", "ucc", "nbdist"}
"""Backends in place of which the world's own group serves."""


def role(rank: int, size: int, n_ps: int) -> tuple[str, int, int]:
    """(name, number, count): a rank's role, its number in it, and how many have it.

    The last `n_ps` ranks are parameter servers, "ps"; the others, "worker".
    """
    workers = size - n_ps
    if rank < workers:
        return "worker", rank, workers
    return "ps", rank - workers, n_ps


def environment(rank: int, size: int, n_ps: int) -> dict[str, str]:
    """What torchrun sets beside the variables that a rank has from its start.

    `TF_CONFIG` names the roles as TensorFlow's scripts expect them. Its addresses stand
    for the ranks: nothing listens there.
    """
    name, number, count = role(rank, size, n_ps)
    roles: dict[str, list[str]] = {"worker": []}
    for other in range(size):
        roles.setdefault(role(other, size, n_ps)[0], []).append(f"rank{other}:0")
    config = {"cluster": roles, "task": {"type": name, "index": number}}
    return {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": name,
        "ROLE_RANK": str(number),
        "ROLE_WORLD_SIZE": str(count),
        "TORCHELASTIC_RUN_ID": "nbdist",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "NBDIST_N_PS": str(n_ps),
        "TF_CONFIG": json.dumps(config),
    }


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
