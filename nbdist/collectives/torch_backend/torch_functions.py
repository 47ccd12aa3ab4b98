"""Functions of torch that are replaced where torch's fail or wait with our groups.

`replace_functions` puts each in the place of torch's. Called with another group, it
calls torch's function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from nbdist.collectives.registry import default_group
from nbdist.collectives.torch_backend.gloo_groups import count_messages
from nbdist.collectives.torch_backend.nccl_links import (
    connect,
    connect_first,
    release_links,
)
from nbdist.collectives.torch_backend.process_group import NAME, ProcessGroup
from nbdist.collectives.torch_backend.rendezvous import rendezvous

__all__ = ["replace_functions"]


def replace_functions() -> None:
    """Replace the functions. Safe to call twice."""
    for name, ours in _FUNCTIONS.items():
        setattr(distributed_c10d, name, ours)
        setattr(dist, name, ours)
    distributed_c10d._new_process_group_helper = _new_process_group_helper
    count_messages()
    release_links()
    ddp: Any = DistributedDataParallel
    ddp._register_builtin_comm_hook = _register_builtin_comm_hook


def _ours(group: Any) -> ProcessGroup | None:
    """The group that torch's functions would take, if it is of our class."""
    if group is None and dist.is_initialized():
        group = distributed_c10d._get_default_group()
    return group if isinstance(group, ProcessGroup) else None


_torch_batch_isend_irecv = distributed_c10d.batch_isend_irecv
_torch_monitored_barrier = distributed_c10d.monitored_barrier
_torch_new_group: Callable[..., Any] = distributed_c10d._new_process_group_helper
_torch_verify: Callable[..., None] = vars(dist)["_verify_params_across_processes"]
_torch_register_hook: Callable[..., None] = (
    DistributedDataParallel._register_builtin_comm_hook
)


@functools.wraps(_torch_batch_isend_irecv)
def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """torch coalesces only for its own class of groups.

    For other classes it starts the messages one after the other. With NCCL, each
    message would wait for its peer, and two ranks that both send first would deadlock.
    """
    first: Any = p2p_op_list[0] if p2p_op_list else None
    group = _ours(first.group) if isinstance(first, dist.P2POp) else None
    works: list[dist.Work]
    if group is None or group._native(first.tensor) is None:
        # nbdist's messages do not wait at their start
        works = _torch_batch_isend_irecv(p2p_op_list)
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


@functools.wraps(_torch_monitored_barrier)
def monitored_barrier(
    group: Any = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """torch refuses every backend but gloo by its name."""
    ours = _ours(group)
    if ours is None:
        _torch_monitored_barrier(group, timeout, wait_all_ranks)
    else:
        ours.monitored_barrier(timeout, wait_all_ranks)


@functools.wraps(_torch_verify)
def _verify_params_across_processes(
    group: dist.ProcessGroup, tensors: Sequence[Tensor], *args: Any
) -> None:
    """The first call of DDP on its group, in C++."""
    connect(group, tensors, "DistributedDataParallel")
    _torch_verify(group, tensors, *args)


@functools.wraps(_torch_new_group)
def _new_process_group_helper(
    group_size: int,
    group_rank: int | None,
    global_ranks_in_group: Sequence[int],
    backend: str,
    store: Store,
    group_name: str,
    *args: Any,
    **options: Any,
) -> Any:
    """Have the members of a group of torch's meet here, and agree on its name.

    In torch they meet in C++, where nothing releases a rank, by a name that has the
    number of groups which the rank has made. If a group was made on some ranks only,
    the names differ, and the ranks would wait for each other.
    """
    ours = _ours(None)
    ranks = [ours.members.ranks[each] for each in global_ranks_in_group] if ours else []
    if ranks and _meets_in_cpp(backend) and default_group().rank in ranks:
        words = rendezvous(default_group(), ranks, str(group_name))
        group_name = max(words, key=lambda word: (len(word), word))
        if group_name.isdecimal():
            world = distributed_c10d._world
            world.group_count = max(world.group_count, int(group_name) + 1)
        # The number may also be that of a group of other ranks.
        store = PrefixStore(f"of {ranks}", store)
    device_id = None
    if ranks and "nccl" in _parts(backend):
        device_id = options.pop("device_id", None)  # torch would connect in C++
    made = _torch_new_group(
        group_size,
        group_rank,
        global_ranks_in_group,
        backend,
        store,
        group_name,
        *args,
        **options,
    )
    if ranks and "nccl" in _parts(backend) and type(made[0]) is dist.ProcessGroup:
        connect_first(made[0], ranks, str(group_name))
        if device_id is not None:
            made[0].bound_device_id = device_id
            connect(made[0], [device_id], "new_group")
    return made


def _meets_in_cpp(backend: str) -> bool:
    return not _parts(backend) <= {NAME, "fake", "undefined"}


def _parts(backend: str) -> set[str]:
    return {each.rpartition(":")[2] for each in str(backend).lower().split(",")}


@functools.wraps(_torch_register_hook)
def _register_builtin_comm_hook(
    ddp: DistributedDataParallel, comm_hook_type: Any
) -> None:
    """torch's hooks in C++ need the future of a C++ work. Python has the same hooks."""
    if _ours(ddp.process_group) is None:
        _torch_register_hook(ddp, comm_hook_type)
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks: dict[str, Callable[..., Any]] = {
        "ALLREDUCE": default_hooks.allreduce_hook,
        "FP16_COMPRESS": default_hooks.fp16_compress_hook,
    }
    ddp.register_comm_hook(ddp.process_group, hooks[comm_hook_type.name])


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "batch_isend_irecv": batch_isend_irecv,
    "monitored_barrier": monitored_barrier,
    "_verify_params_across_processes": _verify_params_across_processes,
}
