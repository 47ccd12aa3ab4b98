"""One default process group, lent to whoever asks torch.distributed for one.

Scripts and libraries that were written for torchrun call `dist.init_process_group` at
their beginning and `dist.destroy_process_group` at their end. On a rank both find the
world's own group: it is there before the first cell and after the last one. Its
collectives can be interrupted and released, which those of gloo and NCCL cannot; and
where each rank owns a GPU they are NCCL's anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbdist.errors import UsageError

__all__ = ["give_up", "make", "own_groups"]

LENT_FOR = {"gloo", "nccl", "mpi", "ucc", "nbdist"}
"""Backends in place of which the world's own group serves."""

_init, _destroy = c10d.init_process_group, c10d.destroy_process_group
_lent: dist.ProcessGroup | None = None
_asked_for: str | None = None
"""The backend that `dist.init_process_group` was last asked for in its place."""
_others: tuple[dist.ProcessGroup, ...] = ()
"""Groups that are none of the running script's business."""


def make(backend: str, **options: Any) -> None:
    """Make the default group, as `dist.init_process_group` does, and lend it.

    Every rank must call.
    """
    global _asked_for, _lent
    _init(backend, **options)
    _lent, _asked_for = dist.group.WORLD, None
    for module in (dist, c10d):
        module.init_process_group = _lend  # type: ignore[attr-defined]
        module.destroy_process_group = _spare  # type: ignore[attr-defined]
    # Not in c10d itself: what torch asks there is meant for the backend as it is.
    dist.get_backend = _name


def give_up() -> None:
    """Destroy every process group, whoever made it. No rank needs another for it."""
    global _lent
    _lent = None
    if dist.is_initialized():
        _destroy()


@contextmanager
def own_groups(*, keep: bool) -> Iterator[None]:
    """Within, none of the groups made before can be ended. Every rank must enter.

    Args:
        keep: leave the groups that were made within; else they end with it.
    """
    global _asked_for, _others
    before = _asked_for, _others
    _asked_for, _others = None, tuple(c10d._world.pg_map)
    try:
        yield
    finally:
        if not keep:
            _end_groups()
        _asked_for, _others = before


def _end_groups() -> None:
    for group in list(c10d._world.pg_map):  # in the order in which they were made
        if group is not _lent and group not in _others:
            _destroy(group)


def _is_lent() -> bool:
    return _lent is not None and dist.group.WORLD is _lent


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
        UsageError: another world than this one is asked for.
    """
    if not _is_lent() or not _is_lent_for(backend):
        _init(backend, init_method, timeout, world_size, rank, *args, **options)
        return
    here = dist.get_rank(), dist.get_world_size()
    if world_size not in (-1, here[1]) or rank not in (-1, here[0]):
        raise UsageError(
            f"init_process_group(rank={rank}, world_size={world_size}) on rank "
            f"{here[0]} of {here[1]}: leave both out, or take them from the "
            "environment's RANK and WORLD_SIZE; %dist_scale changes the world"
        )
    global _asked_for
    _asked_for = backend or _asked_for


def _is_lent_for(backend: str | None) -> bool:
    """Whether ours serves for "nccl", or for each part of "cpu:gloo,cuda:nccl"."""
    parts = (backend or "nbdist").lower().split(",")
    return all(part.rpartition(":")[2] in LENT_FOR for part in parts)


def _spare(group: dist.ProcessGroup | None = None) -> None:
    """In place of `dist.destroy_process_group`: the world's own group stays.

    Without a group, or with the world's, those of some ranks end, as they do in torch.
    """
    global _asked_for
    if not _is_lent() or group not in (None, _lent):
        _destroy(group)
    else:
        _end_groups()
        _asked_for = None


def _name(group: dist.ProcessGroup | None = None) -> dist.Backend:
    """In place of `dist.get_backend`: whoever has asked for gloo is told gloo.

    Some libraries know backends by name, and with another do without: Ignite's
    `auto_model`, for one, wraps no model in DDP then, and says nothing.
    """
    name = c10d.get_backend(group)
    if _asked_for is not None and _is_lent() and name == c10d.get_backend(_lent):
        return dist.Backend(_asked_for)
    return name
