"""GPU memory and events that the ranks of one host share by CUDA IPC.

A process can also read the memory of a GPU that CUDA_VISIBLE_DEVICES hides from it,
because the driver maps that memory for the current device.
"""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import psutil
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from nbdist.collectives.sync.wait import Swap

__all__ = [
    "Events",
    "can_reach",
    "identity",
    "is_mapped",
    "keep_events",
    "map_memories",
    "open_events",
]

Event = torch.cuda.Event
Events = tuple[Event, Event]
MemoryHandle = tuple[Callable[..., Tensor], tuple[Any, ...]]

_PROBED_BYTES = 64 * 1024
_PROBE_TICKS = (2_000_000, 20_000_000, 200_000_000)
"""Clock ticks for which a GPU is kept busy while its events are queried: about 1, 10
and 100 ms."""
_spare: dict[int, list[Events]] = {}
"""Unused events by device. They are used again, because older drivers have blocked when
events were created and destroyed."""


_given: deque[tuple[int, MemoryHandle]] = deque(maxlen=10_000)
"""Handles of this rank's memory, each with the process that reads by it. The oldest are
forgotten; the memory is then kept if their reader is killed."""
_mapped: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""Memory of other ranks, by the address of its storage."""


def identity() -> str:
    """The UUID of the current device. It is the same in every process."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def can_reach(peer: str) -> bool:
    """Whether the current device may read another device's memory.

    Args:
        peer: the other device's `identity`.

    Returns:
        True also for a device that this process does not see. An attempt to open its
        memory tells.
    """
    own = identity()
    if peer == own:
        return True
    visible = {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }
    if peer in visible:
        here = torch.cuda.current_device()
        return bool(torch.cuda.can_device_access_peer(here, visible[peer]))
    return True


def map_memories(size: int, rank: int, swap: Swap) -> list[Tensor] | None:
    """Allocate `size` bytes on each rank's GPU, and map them on all ranks.

    Every rank must call, on its current device.

    Returns:
        A uint8 tensor of each rank's memory, in rank order; None, on all ranks, if a
        rank cannot read another rank's memory.
    """
    _release_of_dead()
    torch.cuda.ipc_collect()  # free memory that earlier groups have released
    own = _allocate(size)
    have = swap(own is not None)
    if own is None or not all(have):
        return None
    ranks = range(len(have))
    # Each reader gets its own handle. torch counts one reader for each handle, and
    # keeps the memory until all readers have released it.
    tickets = [None if each == rank else _handle(own) for each in ranks]
    pids = swap(os.getpid())
    _given.extend(
        (pid, ticket)
        for pid, ticket in zip(pids, tickets, strict=True)
        if ticket is not None
    )
    handles = [swap(tickets[each]) for each in ranks][rank]
    memories = [own if each == rank else _open(handles[each]) for each in ranks]
    opened = [each for each in memories if each is not None]
    readers = swap([each is not None for each in memories])
    if not all(map(all, readers)):
        for ticket, opens in zip(tickets, readers, strict=True):
            if ticket is not None and not opens[rank]:
                _withdraw(ticket)
        return None
    return opened if _all_read_right(opened, rank, swap) else None


def _allocate(size: int) -> Tensor | None:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cuda")
    except RuntimeError:  # no room
        return None


def _handle(memory: Tensor) -> MemoryHandle | None:
    try:
        return reduce_tensor(memory)  # type: ignore[no-any-return]
    except RuntimeError:  # CUDA IPC is not allowed here
        return None


def _withdraw(handle: MemoryHandle) -> None:
    """Release a handle of this rank's memory that its reader has not opened."""
    rebuild, arguments = handle
    given = inspect.signature(rebuild).bind(*arguments).arguments
    torch.UntypedStorage._release_ipc_counter_cuda(
        given["ref_counter_handle"], given["ref_counter_offset"]
    )


def _release_of_dead() -> None:
    """Release the handles of this rank's memory whose readers have ended.

    A handle that its reader has released before is not affected: torch counts the
    reader of each handle in a place of its own, which is not used again.
    """
    for _ in range(len(_given)):
        pid, ticket = _given.popleft()
        if psutil.pid_exists(pid):
            _given.append((pid, ticket))
        else:
            _withdraw(ticket)


def _open(handle: MemoryHandle | None) -> Tensor | None:
    if handle is None:
        return None
    rebuild, arguments = handle
    bound = inspect.signature(rebuild).bind(*arguments)
    # The memory is mapped for this rank's device, whatever the sender's device number
    # is. A kernel can therefore use it, and no context is made on the other device.
    bound.arguments["storage_device"] = torch.cuda.current_device()
    bound.arguments["event_sync_required"] = False  # a barrier orders the ranks
    try:
        memory: Tensor = rebuild(*bound.args)
    except RuntimeError:  # another container, or no peer access between the devices
        return None
    _mapped[memory.untyped_storage()._cdata] = memory
    return memory


def is_mapped(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is memory of another rank, which this process has mapped."""
    return storage._cdata in _mapped


def _all_read_right(memories: Sequence[Tensor], rank: int, swap: Swap) -> bool:
    """Whether each rank reads the data that the other ranks have written.

    On some platforms the mapping succeeds, but reads return other data.
    """
    probed = min(_PROBED_BYTES, len(memories[rank]))
    memories[rank][:probed].fill_(_mark(rank))
    torch.cuda.synchronize()
    swap(None)  # all ranks have written
    right = all(
        bool((memory[:probed] == _mark(peer)).all())
        for peer, memory in enumerate(memories)
    )
    return all(swap(right))  # all ranks have read


def _mark(rank: int) -> int:
    return rank % 251 + 1


def open_events(rank: int, swap: Swap) -> tuple[Events, list[Events]] | None:
    """Make two interprocess events, and open those of the other ranks.

    Every rank must call, on its current device. Pass this rank's events to
    `keep_events` at the end, because an event must outlive the ranks that query it.

    Returns:
        This rank's events, and those of each other rank; None, on all ranks, if events
        cannot be shared, or do not tell when another rank's work is done.
    """
    device = torch.cuda.current_device()
    spare = _spare.setdefault(device, [])
    mine = spare.pop() if spare else (_event(), _event())
    handles = swap(_handles(mine))
    theirs = None if None in handles else _open_handles(handles, rank, device)
    if all(swap(theirs is not None)) and theirs is not None:
        opened = [event for events in theirs for event in events]
        if _all_tell_right(mine, opened, swap):
            return mine, theirs
    spare.append(mine)
    return None


def _all_tell_right(mine: Events, theirs: Sequence[Event], swap: Swap) -> bool:
    """Whether each rank's events are done for the others when its work is.

    Every rank must call. An opened event that always says that it is done would let
    ranks read memory that is not written yet.
    """
    for ticks in _PROBE_TICKS:
        torch.cuda._sleep(ticks)
        for event in mine:
            event.record()
        swap(None)  # all ranks have recorded
        early = any(event.query() for event in theirs)
        early = any(swap(early))  # all ranks have queried
        was_busy = all(swap(not any(event.query() for event in mine)))
        if was_busy or not early:
            break
    torch.cuda.current_stream().synchronize()
    swap(None)  # all ranks' work is done
    late = not all(event.query() for event in theirs)
    return not (any(swap(late)) or early)


def keep_events(mine: Events) -> None:
    """Keep this rank's events for its next group."""
    _spare.setdefault(mine[0].device.index, []).append(mine)


def _event() -> Event:
    return Event(interprocess=True)


def _handles(events: Events) -> tuple[bytes, bytes] | None:
    try:
        return events[0].ipc_handle(), events[1].ipc_handle()
    except RuntimeError:  # CUDA IPC is not allowed here
        return None


def _open_handles(
    handles: Sequence[tuple[bytes, bytes]], rank: int, device: int
) -> list[Events] | None:
    try:
        return [
            (Event.from_ipc_handle(device, even), Event.from_ipc_handle(device, odd))
            for peer, (even, odd) in enumerate(handles)
            if peer != rank
        ]
    except RuntimeError:  # some drivers open only events of the same device
        return None
