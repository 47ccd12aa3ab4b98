"""Collectives of ranks that share a GPU: through device memory that all of them map.

NCCL refuses two ranks on one GPU. Here rank 0's allocation is opened by the others
through CUDA IPC and used like the shared memory of the CPU transport. The host gate
orders what the ranks queue; interprocess events order what the device does. No data
passes through the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from ._gate_shared import SharedGate
from ._hooks import Hooks
from ._slots import Slots, slots_bytes
from ._transport_shared import SharedTransport

__all__ = ["DeviceTransport"]


@dataclass(frozen=True)
class _Offer:
    """What a rank gives the others to open."""

    events: tuple[bytes, bytes]
    memory: tuple[Callable[..., Tensor], tuple[Any, ...]] | None
    """From rank 0 alone."""


class DeviceTransport(SharedTransport):
    """The slots lie in device memory; a step is ordered by one event of each rank.

    A slot of step s is overwritten in step s+2, after the events of step s+1, which
    each rank's stream reaches after its reads of step s.
    """

    description: ClassVar[str] = "CUDA IPC"

    @classmethod
    def connect(
        cls,
        gate: SharedGate,
        hooks: Hooks,
        slot: int,
        swap: Callable[[Any], list[Any]],
    ) -> DeviceTransport | None:
        """Share memory and events. Every rank must call, on its current device.

        Args:
            gate: where the ranks of the host meet.
            hooks: the group's.
            slot: bytes of device memory for one rank's block.
            swap: gives every rank's item, in rank order; all ranks must call.

        Returns:
            None, on all ranks, where CUDA IPC is not to be had.
        """
        size = slots_bytes(gate.size, slot)
        mine = [torch.cuda.Event(interprocess=True) for _ in range(2)]
        memory, offer = _offer(mine, size if gate.rank == 0 else None)
        offers = swap(offer)
        opened = None if None in offers else _open(offers, gate.rank, memory)
        if not all(swap(opened is not None)) or opened is None:
            return None
        slots = Slots(opened[0], gate.rank, gate.size)
        return cls(gate, slots, hooks, mine, opened[1])

    def __init__(
        self,
        gate: SharedGate,
        slots: Slots,
        hooks: Hooks,
        mine: list[torch.cuda.Event],
        others: list[list[torch.cuda.Event]],
    ) -> None:
        super().__init__(gate, slots, hooks)
        self._own_events, self._their_events = mine, others
        self._steps = 0

    def _pass(self, first: bool) -> None:
        parity = self._parity
        stream = torch.cuda.current_stream()
        self._own_events[parity].record(stream)
        super()._pass(first)
        for event in self._their_events[parity]:
            stream.wait_event(event)
        self._steps += 1

    @property
    def _parity(self) -> int:
        # Not the gate's: calls for CPU tensors pass it too, without an event.
        return self._steps & 1


def _offer(
    events: list[torch.cuda.Event], size: int | None
) -> tuple[Tensor | None, _Offer | None]:
    try:
        even, odd = (event.ipc_handle() for event in events)
        if size is None:
            return None, _Offer((even, odd), None)
        memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        return memory, _Offer((even, odd), reduce_tensor(memory))
    except RuntimeError:  # no room, or CUDA IPC is not allowed here
        return None, None


def _open(
    offers: list[_Offer], rank: int, memory: Tensor | None
) -> tuple[Tensor, list[list[torch.cuda.Event]]] | None:
    """Rank 0's memory, and the others' events for even and for odd steps."""
    device = torch.cuda.current_device()
    theirs = [offer.events for peer, offer in enumerate(offers) if peer != rank]
    try:
        events = [
            [torch.cuda.Event.from_ipc_handle(device, pair[parity]) for pair in theirs]
            for parity in range(2)
        ]
        if memory is None:
            assert offers[0].memory is not None  # rank 0's
            rebuild, arguments = offers[0].memory
            memory = rebuild(*arguments)
    except RuntimeError:  # another container, or a platform without CUDA IPC
        return None
    return memory, events
