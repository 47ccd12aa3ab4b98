"""Collectives of ranks on one host whose GPUs can read each other: by CUDA IPC.

NCCL refuses two ranks on one GPU, and is not in every build of torch. Here each rank
has slots in the memory of its own GPU, and the others read them where they lie: their
share of each to reduce it, and then the shares of the result. Each element crosses
between two GPUs no more often than in a ring, in two steps instead of 2(N-1), and no
data passes through the host. The host's barrier orders what the ranks queue, an `Order`
what the devices do.
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
    """The slots lie in device memory; the devices are ordered at each step.

    A slot of step s is overwritten in step s+2, after the meeting of step s+1, which
    waits for what each rank has read in step s.
    """

    description: ClassVar[str] = "CUDA IPC"
    at_once_bytes: ClassVar[int] = 512 * 1024  # a step costs more than reading that

    @classmethod
    def connect(
        cls, barrier: SharedBarrier, hooks: Hooks, slot: int, swap: Swap
    ) -> DeviceTransport | None:
        """Share memory and events. Every rank must call, on its current device.

        Args:
            barrier: where the ranks of the host meet.
            hooks: the group's.
            slot: bytes of device memory for one rank's block.
            swap: gives every rank's item, in rank order; all ranks must call.

        Returns:
            None, on all ranks, where CUDA IPC is not to be had.
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
        # Not the barrier's: calls for CPU tensors pass it too, and use no slots here.
        return self._steps & 1

    def _copy_out(self, results: Sequence[Tensor], block: Tensor) -> None:
        torch.cat(list(results), out=block)  # in one kernel, from wherever they lie

    def close(self) -> None:
        self._order.close()  # first: it waits for what still reads the slots
        super().close()
