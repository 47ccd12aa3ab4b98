"""What ranks of one host show each other of their GPUs: memory and events, by CUDA IPC.

A GPU that this process cannot name, as CUDA_VISIBLE_DEVICES hides it, can be read all
the same: the driver maps its memory for the current device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pynvml
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from nbdist.collectives.sync.wait import Swap

__all__ = [
    "Events",
    "can_reach",
    "identity",
    "keep_events",
    "map_memories",
    "open_events",
]

Event = torch.cuda.Event
Events = tuple[Event, Event]
Ticket = tuple[Callable[..., Tensor], tuple[Any, ...]]

_PROBED_BYTES = 64 * 1024
_spare: dict[int, list[Events]] = {}
"""By device. Making and destroying events has held up older drivers."""


def identity() -> str:
    """The current device's, the same in every process that uses it."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def can_reach(peer: str) -> bool:
    """Whether the current device may read another's memory, as far as is known.

    Args:
        peer: the other's `identity`.
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
    return _driver_allows(own, peer)


def _driver_allows(own: str, peer: str) -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return True  # opening the memory will tell
    try:
        cards = [
            pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{each}") for each in (own, peer)
        ]
        # A plain int: newer versions have an enum there that ctypes refuses.
        reading = int(pynvml.NVML_P2P_CAPS_INDEX_READ)
        status = pynvml.nvmlDeviceGetP2PStatus(*cards, reading)
        return int(status) == int(pynvml.NVML_P2P_STATUS_OK)
    except pynvml.NVMLError:
        return True  # likewise
    finally:
        pynvml.nvmlShutdown()


def map_memories(size: int, rank: int, swap: Swap) -> list[Tensor] | None:
    """Memory of each rank's, `size` bytes on its GPU, that all may read.

    Every rank must call, on its current device.

    Returns:
        In rank order; None, on all ranks, where one cannot read another's.
    """
    torch.cuda.ipc_collect()  # what earlier groups have let go of since
    own = _allocate(size)
    have = swap(own is not None)
    if own is None or not all(have):
        return None
    ranks = range(len(have))
    # A ticket for each reader: torch counts one reader for each, and keeps the memory
    # until all of them have let go of it.
    tickets = [swap(None if each == rank else _ticket(own)) for each in ranks][rank]
    memories = [own if each == rank else _open(tickets[each]) for each in ranks]
    opened = [each for each in memories if each is not None]
    if not all(swap(len(opened) == len(ranks))):
        return None
    return opened if _all_read_right(opened, rank, swap) else None


def _allocate(size: int) -> Tensor | None:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cuda")
    except RuntimeError:  # no room
        return None


def _ticket(memory: Tensor) -> Ticket | None:
    try:
        return reduce_tensor(memory)  # type: ignore[no-any-return]
    except RuntimeError:  # CUDA IPC is not allowed here
        return None


def _open(ticket: Ticket | None) -> Tensor | None:
    if ticket is None:
        return None
    rebuild, arguments = ticket
    bound = inspect.signature(rebuild).bind(*arguments)
    # Mapped for the device of this rank, whatever number the sender's has there: so
    # that both are operands of one kernel, and no context is made on the other one.
    bound.arguments["storage_device"] = torch.cuda.current_device()
    bound.arguments["event_sync_required"] = False  # the ranks meet anyway
    try:
        return rebuild(*bound.args)
    except RuntimeError:  # another container, or devices that do not reach each other
        return None


def _all_read_right(memories: Sequence[Tensor], rank: int, swap: Swap) -> bool:
    """Write here, read there. Some platforms map what then reads as something else."""
    probed = min(_PROBED_BYTES, len(memories[rank]))
    memories[rank][:probed].fill_(_mark(rank))
    torch.cuda.synchronize()
    swap(None)  # all have written
    right = all(
        bool((memory[:probed] == _mark(peer)).all())
        for peer, memory in enumerate(memories)
    )
    return all(swap(right))  # and all have read


def _mark(rank: int) -> int:
    return rank % 251 + 1


def open_events(rank: int, swap: Swap) -> tuple[Events, list[Events]] | None:
    """Two interprocess events of this rank, and those of the others.

    Every rank must call, on its current device. Give this rank's to `keep_events` in
    the end: an event must outlive whoever may still look at it.

    Returns:
        None, on all ranks, where events cannot be shared.
    """
    device = torch.cuda.current_device()
    spare = _spare.setdefault(device, [])
    mine = spare.pop() if spare else (_event(), _event())
    handles = swap(_handles(mine))
    theirs = None if None in handles else _open_handles(handles, rank, device)
    if all(swap(theirs is not None)) and theirs is not None:
        return mine, theirs
    spare.append(mine)
    return None


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
    except RuntimeError:  # not an event of this device, and the driver wants that
        return None
