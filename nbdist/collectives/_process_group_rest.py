"""What a process group of torch.distributed has beside its collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from nbdist.collectives.ops.barrier import barrier

if TYPE_CHECKING:
    from nbdist.collectives.group import Group

__all__ = ["Rest", "coalesce_batches"]


def _refuse(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"nbdist has no {name}: {instead}")

    refuse.__name__ = name.rsplit(".", 1)[-1]
    refuse.__doc__ = f"Refused: {instead}."
    return refuse


class Rest:
    """A part of `ProcessGroup`: its barriers, its numbers, and what it refuses."""

    members: Group
    _timeout: timedelta

    def _native(self, tensors: Any) -> dist.ProcessGroup | None:
        """The group to use in place of this one for these tensors."""
        raise NotImplementedError

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that tells who is missing when its time runs out, as all here do.

        Args:
            timeout: None takes the group's.
            wait_all_ranks: the error names all who are missing in any case.
        """
        barrier(group=self.members, timeout=timeout or self._timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.members.sequence

    def _set_sequence_number_for_group(self) -> None:
        """The members have counted alike from the first call on."""

    def _wait_for_pending_works(self) -> None:
        self.members.drain()

    def _has_hooks(self) -> bool:
        return False

    split_group = _refuse("split_group", "make a group with dist.new_group")
    new_window = _refuse("new_window", "send and receive")
    reconfigure = _refuse("reconfigure", "the world renews its groups by itself")
    get_reconfigure_handle = _refuse(
        "get_reconfigure_handle", "the world renews its groups by itself"
    )
    _add_ephemeral_timeout = _refuse(
        "_add_ephemeral_timeout", "give the call its time-out"
    )
    merge_remote_group = _refuse("merge_remote_group", "make a group of all ranks")
    _enable_collectives_timing = _refuse(
        "_enable_collectives_timing", "time the calls themselves"
    )
    _register_on_completion_hook = _refuse(
        "_register_on_completion_hook", "use the future of each work"
    )


for _hook in ("pre", "post", "abort"):
    for _verb in ("register", "unregister"):
        _name = f"{_verb}_{_hook}_hook"
        setattr(Rest, _name, _refuse(_name, "use the future of each work"))


def coalesce_batches() -> None:
    """Let `dist.batch_isend_irecv` coalesce messages of our process groups too.

    torch does it for groups of exactly its own class, and else begins the messages one
    by one. NCCL would then wait in each for its other end, and two ranks that each send
    before they receive would wait for each other. Safe to call twice.
    """
    if distributed_c10d.batch_isend_irecv is not _batch_isend_irecv:
        distributed_c10d.batch_isend_irecv = _batch_isend_irecv
        dist.batch_isend_irecv = _batch_isend_irecv


_one_by_one = distributed_c10d.batch_isend_irecv


@functools.wraps(_one_by_one)
def _batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    first: Any = p2p_op_list[0] if p2p_op_list else None
    group: Any = getattr(first, "group", None) or distributed_c10d._get_default_group()
    ours = isinstance(first, dist.P2POp) and isinstance(group, Rest)
    works: list[dist.Work]
    if not ours or group._native(first.tensor) is None:
        works = _one_by_one(p2p_op_list)  # in our own messages nothing waits
        return works
    distributed_c10d._check_p2p_op_list(p2p_op_list)
    device = first.tensor.device
    coalescing: Any = distributed_c10d._coalescing_manager
    with coalescing(group, device, async_ops=True) as batch:
        for each in p2p_op_list:
            peer = "group_dst" if each.op is dist.isend else "group_src"
            each.op(
                each.tensor,
                group=each.group,
                tag=each.tag,
                **{peer: each.group_peer},
            )
    works = batch.works
    return works
