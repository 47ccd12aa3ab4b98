"""One default process group for all cells, scripts and libraries of a rank.

Scripts and libraries for torchrun call `dist.init_process_group` when they begin and
`dist.destroy_process_group` when they end. On a rank, the first call uses the world's
default group, and the second leaves that group alive, because it serves all cells. Its
collectives can be interrupted and released, unlike those of gloo and NCCL. If each rank
owns a GPU, its CUDA tensors use NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbdist.collectives import default_group
from nbdist.collectives.torch_backend.process_group import ProcessGroup
from nbdist.engine import ddp_modules
from nbdist.errors import UsageError

__all__ = [
    "begin_again",
    "destroy",
    "destroy_one",
    "is_reconfigured",
    "make",
    "own_groups",
]

REPLACED = {"gloo", "nccl", "mpi", "ucc", "nbdist"}
"""Backends that the shared group replaces."""

_init, _destroy = c10d.init_process_group, c10d.destroy_process_group
_shared: dist.ProcessGroup | None = None
_requested: str | None = None
"""The backend of the last call of `dist.init_process_group`."""
_others: tuple[dist.ProcessGroup, ...] = ()
"""Groups that were made before the running script, which cannot destroy them."""
_last: dist.ProcessGroup | None = None
"""The shared group that was destroyed last, until the next one is made."""


def make(backend: str, **options: Any) -> None:
    """Make the default group, as `dist.init_process_group` does, and share it.

    DDP modules of the shared group before it continue with this one. Every rank must
    call.
    """
    global _last, _requested, _shared
    _init(backend, **options)
    group = dist.group.WORLD
    assert group is not None
    _shared, _requested = group, None
    if _last is not None:
        ddp_modules.continue_with(group, _last)
        _last = None
    for module in (dist, c10d):
        module.init_process_group = _init_process_group  # type: ignore[attr-defined]
        module.destroy_process_group = _destroy_process_group  # type: ignore[attr-defined]
    # c10d's own `get_backend` stays: torch itself needs the real backend.
    dist.get_backend = _get_backend


def is_reconfigured() -> bool:
    """Whether `reconfigure` has given the default group other members."""
    return isinstance(_shared, ProcessGroup) and not _shared.has(default_group())


def begin_again() -> None:
    """Have DDP modules forget a step that was not completed. Every rank must call.

    All ranks are members of the default group again.
    """
    if _shared is not None:
        if isinstance(_shared, ProcessGroup):
            _shared.return_to(default_group())
        ddp_modules.continue_with(_shared, _shared)


def destroy() -> None:
    """Destroy all process groups, the user's included. Waits for no other rank."""
    global _last, _shared
    _last, _shared = _shared or _last, None
    if dist.is_initialized():
        _destroy()


def destroy_one(group: dist.ProcessGroup) -> None:
    """Destroy a process group of the user's. Waits for no other rank if aborted."""
    _destroy(group)


@contextmanager
def own_groups(*, keep: bool) -> Iterator[None]:
    """Protect the existing groups within this block. Every rank must enter it.

    Args:
        keep: Whether groups made in the block outlive it.
    """
    global _requested, _others
    before = _requested, _others
    _requested, _others = None, tuple(c10d._world.pg_map)
    try:
        yield
    finally:
        if not keep:
            _end_groups()
        _requested, _others = before


def _end_groups() -> None:
    for group in list(c10d._world.pg_map):  # in the order in which they were made
        if group is not _shared and group not in _others:
            _destroy(group)


def _is_shared() -> bool:
    return _shared is not None and dist.group.WORLD is _shared


def _init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    *args: Any,
    **options: Any,
) -> None:
    """Replaces `dist.init_process_group`: uses the shared group.

    Raises:
        UsageError: `rank` or `world_size` differs from this rank's.
    """
    if not _is_shared() or not _is_replaced(backend):
        _init(backend, init_method, timeout, world_size, rank, *args, **options)
        return
    here = dist.get_rank(), dist.get_world_size()
    if world_size not in (-1, here[1]) or rank not in (-1, here[0]):
        raise UsageError(
            f"init_process_group(rank={rank}, world_size={world_size}) on rank "
            f"{here[0]} of {here[1]}: leave both out, or take them from the "
            "environment's RANK and WORLD_SIZE; %dist_scale changes the world"
        )
    global _requested
    _requested = backend or _requested


def _is_replaced(backend: str | None) -> bool:
    """Whether the shared group replaces each part of "nccl" or "cpu:gloo,cuda:nccl"."""
    parts = (backend or "nbdist").lower().split(",")
    return all(part.rpartition(":")[2] in REPLACED for part in parts)


def _destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Replaces `dist.destroy_process_group`: the shared group stays.

    Without an argument, or with the shared group, the script's other groups are
    destroyed.
    """
    global _requested
    if not _is_shared() or group not in (None, _shared):
        _destroy(group)
    else:
        _end_groups()
        _requested = None


def _get_backend(group: dist.ProcessGroup | None = None) -> dist.Backend:
    """Replaces `dist.get_backend`: returns the backend of `init_process_group`.

    Some libraries compare the name. For instance, Ignite's `auto_model` silently does
    not wrap a model in DDP if the name is unknown to it.
    """
    name = c10d.get_backend(group)
    if _requested is not None and _is_shared() and name == c10d.get_backend(_shared):
        return dist.Backend(_requested)
    return name
