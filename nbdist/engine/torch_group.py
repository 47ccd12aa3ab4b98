"""torch.distributed on a rank, initialised before the user's first cell."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from nbdist.collectives import all_gather, default_group
from nbdist.collectives.torch_backend.process_group import (
    ProcessGroup,
    nccl_links,
    nccl_of,
)
from nbdist.collectives.torch_backend.registration import register
from nbdist.collectives.torch_backend.rendezvous import Rendezvous
from nbdist.collectives.torch_backend.stores import make_store
from nbdist.engine import shared_default_group
from nbdist.errors import CollectiveAborted
from nbdist.ipc.host_sockets import INTERFACE
from nbdist.wire import NcclCall, NcclTotal

__all__ = [
    "abort",
    "advice",
    "end_batches",
    "equalize_group_counts",
    "finish",
    "groups_made",
    "has_failed_connection",
    "is_waiting",
    "late_s",
    "nccl_calls",
    "nccl_operation",
    "nccl_trace",
    "renew_nccl",
    "start",
    "stop",
    "uses_nccl",
]

# A waiting collective is released when a peer fails. No time-out is needed.
NO_TIMEOUT = timedelta(days=7)
FINISH_WITHIN_S = 5.0
"""A GPU that takes longer waits for a rank that makes no call."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables with the interface by which the ranks reach each other: on one
host the loopback device. Groups that the user makes meet there."""
DEFAULTS = {
    # A time-out of NCCL ends the cell with an error. By default torch's watchdog ends
    # the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # After an error torch's watchdog sleeps for four times as long, so that the group
    # cannot be destroyed.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Environment variables of a rank, where the user has set none."""

_SIZED = {
    "all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base",
}  # fmt: skip
"""The collectives of NCCL whose inputs are of equal size on all ranks."""

_at_start = 0
_has_destroyed = False
"""Whether a group of the user's was destroyed, because NCCL had failed."""


def start(run_dir: Path, owns_gpu: bool, generation: int = 0) -> None:
    """Initialise the default process group, and share it. Every rank must call.

    The rendezvous of ranks on one host is a file in the cluster's folders. It opens no
    port. Ranks on several hosts meet at a port of rank 0.

    Args:
        run_dir: The cluster's folder.
        owns_gpu: Whether each rank has a GPU of its own, so that NCCL can be used.
        generation: The world's generation. Each has its own file.
    """
    global _at_start
    register()
    interface = os.environ.get(INTERFACE, "lo")
    for name, value in {**DEFAULTS, **dict.fromkeys(INTERFACES, interface)}.items():
        os.environ.setdefault(name, value)
    name = f"torch-store-{generation}"
    if owns_gpu:
        _make("cpu:nbdist,cuda:nccl", make_store(default_group(), run_dir, name))
        if not _nccl_takes_devices():
            abort()
            shared_default_group.destroy()
            owns_gpu = False
            name += "-without-nccl"
    if not owns_gpu:
        _make("nbdist", make_store(default_group(), run_dir, name))
    _at_start = distributed_c10d._world.group_count


def _make(backend: str, store: Store) -> None:
    """Make the default process group. Every rank must call, with a new store."""
    group = default_group()
    seconds = group.config.timeout_s
    shared_default_group.make(
        backend,
        store=store,
        rank=group.rank,
        world_size=group.size,
        timeout=NO_TIMEOUT if seconds is None else timedelta(seconds=seconds),
    )


def _nccl_takes_devices() -> bool:
    """Whether NCCL connects the ranks' devices. Every rank must call.

    Some of its versions refuse two MIG devices of one GPU, which a trial shows. It
    takes other devices, and a fault of NCCL is then the error of the first call.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not any(_flags(names.startswith("MIG-"))):
        return True
    world = default_group()
    nccl: Any = distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    device = torch.cuda.current_device()

    def sum_one() -> None:
        with torch.cuda.device(device):
            nccl.allreduce([torch.ones(1, device="cuda")]).wait()

    # As the first call of a group, but a failure leaves the world's group whole.
    meeting = Rendezvous(world, range(world.size), "the trial of NCCL")
    try:
        meeting.attempt(sum_one, world.raise_if_aborted)
    except (dist.DistBackendError, CollectiveAborted):
        world.raise_if_aborted()
        return False
    return True


def _flags(own: bool) -> list[bool]:
    """A flag of every rank. Every rank must call."""
    here = torch.tensor([own], device="cpu")  # whatever the user's default device is
    flags = [torch.empty_like(here) for _ in default_group().ranks]
    all_gather(flags, here)
    return [bool(flag) for flag in flags]


def groups_made() -> int:
    """The number of groups that this rank has made since the default one.

    Each rank counts its groups, and the members of a gloo or NCCL group find each other
    by the count. Ranks whose counts differ would wait forever.
    """
    return distributed_c10d._world.group_count - _at_start


def equalize_group_counts(comm: Any) -> None:
    """Set the count of groups to the highest of all ranks. Every rank must call.

    Args:
        comm: An mpi4py communicator over all ranks.
    """
    from mpi4py import MPI

    here = distributed_c10d._world
    here.group_count = comm.allreduce(here.group_count, MPI.MAX)


def end_batches() -> None:
    """End the batches that a failed call has left open. torch leaves them so.

    It would add the next calls of their groups to them, and run none.
    """
    distributed_c10d._world.pg_coalesce_state.clear()
    for links in map(nccl_links, list(distributed_c10d._world.pg_names)):
        if links is not None:
            links.batches.clear()


def uses_nccl() -> bool:
    """Whether the default group gives CUDA tensors to NCCL."""
    return "cuda:nccl" in dist.get_backend_config()


def _named_groups() -> Iterator[tuple[dist.ProcessGroup, str]]:
    """Each process group, with a name that differs for each set of its members."""
    for group, name in list(distributed_c10d._world.pg_names.items()):
        epoch = group.epoch if isinstance(group, ProcessGroup) else ""
        yield group, f"{name}/{epoch}" if epoch else str(name)


def nccl_calls() -> dict[str, NcclTotal]:
    """The collectives and messages that this rank has queued with NCCL, by group name.

    They wait on the GPU until all members of the group, or the peer, have queued them.
    """
    return {name: _total(group) for group, name in _named_groups()}


def _total(group: dist.ProcessGroup) -> NcclTotal:
    nccl, links = nccl_of(group), nccl_links(group)
    if nccl is None:
        return NcclTotal(0, 0)
    return NcclTotal(
        nccl._get_sequence_number_for_group(),
        group.native_calls.digest if isinstance(group, ProcessGroup) else 0,
        _late_s(nccl),
        tuple(links.sent.items()) if links else (),
        tuple(links.received.items()) if links else (),
    )


def has_failed_connection() -> bool:
    """Whether NCCL has not connected a group, or two of its ranks, on this rank."""
    found = map(nccl_links, list(distributed_c10d._world.pg_names))
    return any(links is not None and links.has_failed for links in found)


def late_s() -> float:
    """The time-out in seconds that has passed in a call of NCCL; 0 if none has."""
    return max((total.late_s for total in nccl_calls().values()), default=0.0)


def _late_s(nccl: Any) -> float:
    """The time-out in seconds of a group of NCCL, if it has passed in a call; else 0.

    torch's watchdog notes it. The call may have completed since.
    """
    c10d: Any = torch._C._distributed_c10d
    if nccl.get_error() != c10d.ErrorType.TIMEOUT:
        return 0.0
    return float(nccl.options._timeout.total_seconds())


def nccl_operation(name: str) -> str:
    """The call that a group has queued last with NCCL, by the group's name."""
    found = (nccl_links(group) for group, its in _named_groups() if its == name)
    return next((links.last for links in found if links), "a collective")


def is_waiting(name: str) -> bool:
    """Whether this rank's GPU may wait in a call of a group, by the group's name.

    A message can complete before its peer receives it.
    """
    groups = [group for group, its in _named_groups() if its == name]
    uids = {nccl.uid for nccl in map(nccl_of, groups) if nccl is not None}
    calls = [entry for entry in _nccl_record() if entry["pg_id"] in uids]
    return not calls or any(entry["state"] != "completed" for entry in calls)


def _nccl_record() -> list[dict[str, Any]]:
    """torch's record of the last calls with NCCL."""
    c10d: Any = torch._C._distributed_c10d
    return list(json.loads(c10d._dump_nccl_trace_json()).get("entries", ()))


def nccl_trace() -> dict[str, dict[int, NcclCall]]:
    """This rank's last collectives with NCCL, by the group's name and their number.

    torch records 2,000 calls, or TORCH_FR_BUFFER_SIZE.
    """
    names, details, trials = {}, {}, {}
    for group, name in _named_groups():
        nccl, links = nccl_of(group), nccl_links(group)
        if nccl is not None:
            names[nccl.uid], trials[nccl.uid] = name, links.trial if links else 0
            if isinstance(group, ProcessGroup):
                details[nccl.uid] = group.native_calls.details
    if not names:
        return {}
    found: dict[str, dict[int, NcclCall]] = {name: {} for name in names.values()}
    for entry in _nccl_record():
        uid, number = entry["pg_id"], entry["collective_seq_id"]
        if uid in names and number != trials[uid] and not entry["is_p2p"]:
            calls = found[names[uid]]
            kind = _kind(entry, details.get(uid, {}).get(number, ""))
            number -= 0 < trials[uid] < number
            call = NcclCall(kind, entry["state"] == "completed")
            before = calls.get(number)
            if before is not None:  # they are coalesced
                kind = f"{before.kind} and {call.kind}"
                call = NcclCall(kind, before.is_done and call.is_done)
            calls[number] = call
    return found


def _kind(entry: Mapping[str, Any], details: str) -> str:
    """What must be equal on all ranks, in an entry of torch's record.

    Args:
        entry: The entry, which has neither a reduce-op nor a root.
        details: These, as text; "" if the call has none.
    """
    name = str(entry["profiling_name"]).removeprefix("nccl:")
    equal = []
    if name in _SIZED:
        count = sum(map(math.prod, entry["input_sizes"]))
        equal = [*entry["input_dtypes"], f"{count:,} elements"]
    if details:
        equal.append(details)
    return f"{name}({', '.join(equal)})" if equal else name


def finish() -> None:
    """Wait for the work on this rank's GPU, if NCCL is used; `FINISH_WITHIN_S` at most.

    NCCL's work may wait for a rank that makes no call.
    """
    if not any(nccl_of(group) for group in list(distributed_c10d._world.pg_names)):
        return
    device = torch.cuda.current_device()

    def synchronize() -> None:
        with contextlib.suppress(RuntimeError):  # the CUDA context has failed
            torch.cuda.synchronize(device)

    waiting = threading.Thread(target=synchronize, name="nbdist-finish", daemon=True)
    waiting.start()
    waiting.join(FINISH_WITHIN_S)


def abort() -> bool:
    """Release this rank from NCCL's collectives; any thread may call.

    Returns:
        Whether there were NCCL groups, which are now unusable on all ranks.
    """
    aborted = False
    # torch's function that aborts all groups would also remove those of other backends.
    for group in list(distributed_c10d._world.pg_names):
        nccl = nccl_of(group)
        if nccl is not None:
            nccl.abort()
            aborted = True
    return aborted


def renew_nccl(generation: int) -> None:
    """Have NCCL's groups made again. Every rank must call, when all are idle.

    The process groups keep their members, and make NCCL's part again with their next
    collective. Those with torch's own backend "nccl" are destroyed, because torch can
    neither use nor replace a communicator that was aborted.

    Args:
        generation: The world's next generation.
    """
    global _has_destroyed
    abort()
    for group in list(distributed_c10d._world.pg_names):
        if isinstance(group, ProcessGroup):
            group.renew_nccl(generation)
        elif nccl_of(group) is not None:
            shared_default_group.destroy_one(group)
            _has_destroyed = True


def advice(error: BaseException) -> str:
    """What to do about the error of a call on a group that `renew_nccl` destroyed.

    "" for other errors.
    """
    if not (_has_destroyed and "not initialized in the world group map" in str(error)):
        return ""
    return (
        'If its backend is "nccl", the group was destroyed after an error, when '
        "NCCL's groups were made again: make it again with dist.new_group. Without a "
        "backend, dist.new_group makes a group that stays valid"
    )


def stop() -> None:
    """Destroy all process groups, the user's included. Waits for no other rank.

    NCCL's unfinished work is dropped: call `finish` before.
    """
    abort()  # NCCL's shutdown would wait for the other ranks, also for dead ones
    for group in list(distributed_c10d._world.pg_names):
        if isinstance(group, ProcessGroup):
            group.abort()
    shared_default_group.destroy()
