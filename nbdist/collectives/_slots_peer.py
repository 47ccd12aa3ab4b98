"""Slots that lie with the rank that writes them, each in memory of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nbdist.collectives._slots import SHARE_ELEMENTS, Place, Slots, slots_bytes

__all__ = ["PeerSlots", "peer_bytes"]


def peer_bytes(size: int, slot: int) -> int:
    """Memory of each of `size` ranks: two places of a slot and a share of a result."""
    return slots_bytes(size, slot) // size


class PeerSlots(Slots):
    """Views of the memory of every rank: all may read it, its rank alone writes to it.

    So nobody's memory can be changed by another rank, whatever becomes of that one; and
    where the ranks have a GPU each, reading is spread over all of them.
    """

    def __init__(self, memories: Sequence[Tensor], rank: int) -> None:
        """Use `peer_bytes(...)` bytes of each rank, in rank order."""
        super().__init__(memories[rank], rank, len(memories))
        self._memories = list(memories)
        place = len(memories[rank]) // 2
        self._slot = place // (self._size + 1) * self._size
        self._pitch = place

    def close(self) -> None:
        super().close()
        self._memories.clear()
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _make_place(self, parity: int, dtype: torch.dtype, length: int) -> Place:
        share = -(-length // self._size // SHARE_ELEMENTS) * SHARE_ELEMENTS
        edges = [min(rank * share, length) for rank in range(self._size + 1)]
        mine = slice(edges[self._rank], edges[self._rank + 1])
        slots = [self._view(parity, rank, dtype)[:length] for rank in range(self._size)]
        results = [
            self._share(parity, rank, dtype)[: edges[rank + 1] - edges[rank]]
            for rank in range(self._size)
        ]
        return Place(
            slots, results, [slot[mine] for slot in slots], results[self._rank]
        )

    def _view(self, parity: int, index: int, dtype: torch.dtype) -> Tensor:
        start = parity * self._pitch
        return self._memories[index][start : start + self._slot].view(dtype)

    def _share(self, parity: int, index: int, dtype: torch.dtype) -> Tensor:
        start = parity * self._pitch
        return self._memories[index][start + self._slot : start + self._pitch].view(
            dtype
        )
