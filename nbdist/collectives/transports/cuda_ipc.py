"""Collectives by CUDA IPC, for ranks on one host whose GPUs can read each other.

NCCL refuses two ranks on one GPU, and some builds of torch have no NCCL. Here each rank
has slots in the memory of its own GPU. The others read their share of each slot to
reduce it, and then the shares of the result. Each element crosses between two GPUs as
often as in a ring, in two steps instead of 2(N-1), and no data passes through the host.
The group's barrier orders the ranks' hosts, and an `Order` their devices.
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


class DeviceTransport(SharedTransport):
    """A `SharedTransport` with slots in device memory and ordered devices.

    A slot of step s is overwritten in step s+2, after the barrier of step s+1, which
    waits for the reads of step s.
    """

    description: ClassVar[str] = "CUDA IPC"
    at_once_bytes: ClassVar[int] = 512 * 1024  # a step costs more than reading that

    @classmethod
    def connect(
        cls, barrier: SharedBarrier, hooks: Hooks, slot: int, swap: Swap
    ) -> DeviceTransport | None:
        """Share memory and events. Every rank must call, on its current device.

        Args:
            barrier: the group's.
            hooks: the group's.
            slot: bytes of a slot.
            swap: among the group's ranks.

        Returns:
            None, on all ranks, where CUDA IPC does not work.
        """
        reached = all(map(can_reach, swap(identity())))
        if not all(swap(reached)):
            return None
        memories = map_memories(peer_bytes(barrier.size, slot), barrier.rank, swap)
        if memories is None:
            return None
        events = open_events(barrier.rank, swap)
        order: Order
        if events is None:
            order = HostOrder(hooks.check)
        else:
            order = EventOrder(*events, hooks.check)
        return cls(barrier, PeerSlots(memories, barrier.rank), hooks, order)

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
        # Not the barrier's step: calls on CPU tensors pass the same barrier.
        return self._steps & 1

    def _copy_out(self, results: Sequence[Tensor], block: Tensor) -> None:
        torch.cat(list(results), out=block)  # one kernel for all of them

    def close(self) -> None:
        self._order.close()  # first: it waits for pending reads of the slots
        super().close()
