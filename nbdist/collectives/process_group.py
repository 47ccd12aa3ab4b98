"""A backend of torch.distributed over these collectives.

After `register()`, `dist.init_process_group("nbdist")` works on every rank that has
joined a world. With "cpu:nbdist,cuda:nccl", tensors on GPUs go to NCCL instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from nbdist.errors import UsageError

from ._handle import Handle
from ._process_group_members import members_of
from ._work import CollectiveWork, MessageWork, WorkList
from .all_gather import all_gather, all_gather_into_tensor
from .all_reduce import all_reduce
from .all_to_all import all_to_all, all_to_all_single
from .barrier import barrier
from .broadcast import broadcast
from .gather import gather
from .group import Group
from .point_to_point import irecv, isend
from .reduce import reduce
from .reduce_scatter import reduce_scatter, reduce_scatter_tensor
from .scatter import scatter

__all__ = ["ProcessGroup", "register"]

NAME = "nbdist"
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")
_Type = dist.ProcessGroup.BackendType
_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}
_P = ParamSpec("_P")
_Operation = Callable[Concatenate["ProcessGroup", Any, _P], dist.Work]


def register() -> None:
    """Tell torch.distributed of the backend. Safe to call twice."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            NAME, _create, extended_api=True, devices=["cpu", "cuda"]
        )


def _create(options: Any, _: object) -> ProcessGroup:
    """What torch.distributed calls on each member of a new process group."""
    ranks, rank, size = (
        options.global_ranks_in_group,
        options.group_rank,
        options.group_size,
    )
    members = members_of(ranks, options.store, rank, size)
    owned = members if ranks else None
    return ProcessGroup(options.store, members, options.timeout, owned)


def _by_device(operation: _Operation[_P]) -> _Operation[_P]:
    """Give tensors on GPUs to NCCL, where that is the group's backend for them."""

    @functools.wraps(operation)
    def chosen(
        self: ProcessGroup, tensors: Any, *args: _P.args, **kwargs: _P.kwargs
    ) -> dist.Work:
        native = self._native(tensors)
        if native is None:
            return operation(self, tensors, *args, **kwargs)
        work: dist.Work = getattr(native, operation.__name__)(tensors, *args, **kwargs)
        return work

    return chosen


class ProcessGroup(dist.ProcessGroup):
    """A group of ranks, as torch.distributed and all that is built on it see one.

    Every operation takes what c10d's has: lists of one tensor, an options object, ranks
    that count within the group. Those without `asyncOp` return when the result is in
    place; the others at once, and run in the order of the calls in the group's thread.

    Operations raise what those of `nbdist.collectives` raise.
    """

    def __init__(
        self,
        store: dist.Store,
        members: Group,
        timeout: timedelta,
        owned: Group | None = None,
    ) -> None:
        """Make it. Every member must.

        Args:
            store: where NCCL's ranks meet.
            members: the ranks.
            timeout: for operations that come without one.
            owned: a group to close in `shutdown`.
        """
        super().__init__(members.rank, members.size)
        self.members = members
        self._store = store
        self._timeout = timeout
        self._owned = owned
        self._names = {"name": "", "description": ""}
        self._coalesced: list[dist.Work] | None = None
        for device in (_CPU, _CUDA) if torch.cuda.is_available() else (_CPU,):
            self._register_backend(device, _Type.CUSTOM, None)
