"""Collectives by CUDA IPC, for ranks on one host whose GPUs can read each other.

NCCL refuses two ranks on one GPU, and some builds of torch have no NCCL. In this
transport each rank has slots in the memory of its own GPU. Each rank reads its share of
all slots and reduces it. Then each rank reads the other shares of the result. Each
element is sent between GPUs as often as in a ring, but in two steps instead of 2(N-1).
No data passes through the host. The group's barrier orders the ranks' processes, and an
`Order` orders their GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nbdist.collectives.sync.cuda_events import EventOrder, HostOrder, Order
from nbdist.collectives.sync.cuda_peers import (
    can_reach,
    identity,
    map_memories,
    open_events,
)
from nbdist.collectives.sync.shared_barrier import SharedBarrier
from nbdist.collectives.sync.wait import Hooks, Swap
from nbdist.collectives.transports.shared_memory import SharedTransport
from nbdist.collectives.transports.slots import PeerSlots, Slots, peer_bytes

__all__ = ["DeviceTransport"]

_LEAST_SLOT, _MOST_SLOT = 16 * 2**20, 64 * 2**20
_SLOTS_OF_MEMORY = 500
"""A slot is this part of the memory that the rank may use, within the limits above."""
_AT_ONCE_BYTES = 512 * 1024
"""To read this much from the memory of another GPU takes less time than a step."""
_SLOTS_AT_ONCE = 4
"""To read this many slots takes about as long as a step of ranks that share a GPU. The
GPU runs their kernels in turns, and changes the rank in 0.16 ms (H200)."""


class DeviceTransport(SharedTransport):
    """A `SharedTransport` with slots in the memory of GPUs.

    A slot of step s is overwritten in step s+2. All ranks have then read it, because
    the barrier of step s+1 waits for the reads of step s.
    """

    description: ClassVar[str] = "CUDA IPC"
    at_once_bytes = _AT_ONCE_BYTES

    @classmethod
    def connect(
        cls, barrier: SharedBarrier, hooks: Hooks, slot: int | None, swap: Swap
    ) -> DeviceTransport | None:
        """Share memory and events. Every rank must call, on its current device.

        Args:
            barrier: the group's barrier.
            hooks: the group's hooks.
            slot: bytes of a slot; None for a size that suits the GPUs' memory.
            swap: returns every rank's item.

        Returns:
            The transport; None, on all ranks, if CUDA IPC does not work.
        """
        gpus = swap(identity())
        reached = all(map(can_reach, gpus))
        if not all(swap(reached)):
            return None
        if slot is None:
            slot = min(swap(_suitable_slot()))
        memories = map_memories(peer_bytes(barrier.size, slot), barrier.rank, swap)
        if memories is None:
            return None
        events = open_events(barrier.rank, swap)
        order: Order
        if events is None:
            order = HostOrder(hooks.check)
        else:
            order = EventOrder(*events, hooks.check)
        made = cls(barrier, PeerSlots(memories, barrier.rank), hooks, order)
        if len(set(gpus)) == 1:
            made.at_once_bytes = _SLOTS_AT_ONCE * slot // barrier.size
        return made

    def __init__(
        self, barrier: SharedBarrier, slots: Slots, hooks: Hooks, order: Order
    ) -> None:
        super().__init__(barrier, slots, hooks)
        self._order = order
        self._steps = 0

    def _pass(self, first: bool) -> None:
        self._order.before()
        super()._pass(first)
        self._order.after()
        self._steps += 1

    @property
    def _parity(self) -> int:
        # The barrier's step cannot be used, because calls on CPU tensors pass it too.
        return self._steps & 1

    def _copy_out(self, results: Sequence[Tensor], block: Tensor) -> None:
        torch.cat(list(results), out=block)  # one kernel for all results

    def close(self) -> None:
        self._order.close()  # first: it waits for pending reads of the slots
        super().close()


def _suitable_slot() -> int:
    """The bytes of a slot for the memory that this rank may use on its device."""
    device = torch.cuda.current_device()
    usable = float(torch.cuda.get_device_properties(device).total_memory)
    if hasattr(torch.cuda, "get_per_process_memory_fraction"):  # since torch 2.8
        usable *= torch.cuda.get_per_process_memory_fraction(device)
    return int(min(max(usable / _SLOTS_OF_MEMORY, _LEAST_SLOT), _MOST_SLOT))
