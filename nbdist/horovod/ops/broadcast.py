"""broadcast: copies one rank's tensor to all ranks of a process set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nbdist.collectives.ops.validation import Flat, resolve
from nbdist.errors import UsageError
from nbdist.horovod.basics import rank
from nbdist.horovod.handles import begin, complete
from nbdist.horovod.negotiation import Request, copied, named
from nbdist.horovod.ops.allreduce import allreduce
from nbdist.horovod.process_sets import ProcessSet, coordinator_of, global_process_set
from nbdist.horovod.reduce_ops import Average

__all__ = ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return a copy of rank `root_rank`'s tensor. Every rank of the set must call.

    Gradients flow through: the root gets the average of the ranks' gradients, and the
    other ranks get zeros, as in Horovod since 0.22.

    Args:
        tensor: As for `allreduce`.
        root_rank: A world rank in the set.
        name, process_set: As for `allreduce`.
    """
    received: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return received


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `broadcast`; returns a handle. No gradients flow through."""
    handle: int = _start(begin, copied(tensor), root_rank, name, process_set)
    return handle


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`broadcast` in place; returns the tensor. No gradients flow through."""
    received: Tensor = _start(complete, tensor, root_rank, name, process_set)
    return received


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `broadcast_`; returns a handle.

    Do not use the tensor before `synchronize(handle)` has returned.
    """
    handle: int = _start(begin, tensor, root_rank, name, process_set)
    return handle


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
    ) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        received: Tensor = _start(
            complete, copied(tensor), root_rank, name, process_set
        )
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        mean = allreduce(gradients[0], op=Average, process_set=ctx.process_set)
        if rank() != ctx.root_rank:
            mean = torch.zeros_like(mean)
        return mean, None, None, None


def _start(
    how: Callable[..., Any],
    tensor: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> Any:
    """Broadcast in place. `how` is `begin`, or `complete` to wait for the result."""
    coordinator = coordinator_of(process_set)
    resolve(tensor, coordinator.group)
    if root_rank not in process_set.ranks:
        raise UsageError(
            f"root_rank {root_rank}: expected one of the ranks {process_set.ranks}"
        )
    root = process_set.ranks.index(root_rank)
    kind = named("broadcast", name, None, root_rank, tensor, tuple(tensor.shape))
    transport = coordinator.group.transport(tensor.device)
    receives = coordinator.group.rank != root
    flat = Flat(tensor, writes=receives)

    def body() -> None:
        transport.broadcast(flat.tensor, root)
        if receives:
            flat.write_back()

    key = coordinator.name("broadcast", name)
    request = Request(
        key, kind, body, coordinator.abort, has_barrier=transport.has_barrier
    )
    return how(coordinator, request, lambda: tensor)
