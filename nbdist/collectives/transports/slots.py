"""Slots: memory in which each rank writes a block of its tensor for the other ranks.

Even and odd steps use different sets of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = [
    "SHARE_ELEMENTS",
    "PeerSlots",
    "PieceViews",
    "SlotViews",
    "Slots",
    "peer_bytes",
    "rounded_slot",
    "slots_bytes",
]

_PAGE = 4096
SHARE_ELEMENTS = 64
"""Shares start at multiples of this many elements, so that no cache line is shared."""
_CACHED_VIEWS = 512


class SlotViews(NamedTuple):
    """Views of one step's slots as tensors of one dtype and length."""

    slots: list[Tensor]
    """Each rank's slot. Only that rank writes to it."""
    results: list[Tensor]
    """The parts of the result, in order. Each rank writes its own share."""
    shares: list[Tensor]
    """This rank's share of each slot; may be empty."""
    share: Tensor
    """This rank's share of the result; may be empty."""


PieceViews = list[list[Tensor]]
"""`views[source][target]`: the piece for `target` in the slot of `source`."""
_View = TypeVar("_View")
_Kind = tuple[torch.dtype, int]


def slots_bytes(size: int, slot: int) -> int:
    """Bytes of two sets of slots. A set has one for each rank and for the result."""
    return 2 * (size + 1) * rounded_slot(size, slot)


def rounded_slot(size: int, slot: int) -> int:
    """Bytes of a slot: `slot`, rounded up to whole pages for each of `size` ranks."""
    return max(-(-slot // size // _PAGE), 1) * _PAGE * size


class Slots:
    """Slots in memory that all ranks map.

    Views are cached by dtype and length. They come in pairs, for even and odd steps.
    """

    def __init__(self, memory: Tensor, rank: int, size: int) -> None:
        """Divide memory of `slots_bytes(...)` bytes among the ranks."""
        self._rank, self._size = rank, size
        self._bytes = memory
        self._slot = len(memory) // (2 * (size + 1))
        self._slot_views: dict[
            tuple[torch.dtype, int], tuple[SlotViews, SlotViews]
        ] = {}
        self._piece_views: dict[
            tuple[torch.dtype, int], tuple[PieceViews, PieceViews]
        ] = {}

    def capacity(self, dtype: torch.dtype) -> int:
        """Elements that fit into a slot."""
        return self._slot // dtype.itemsize

    def piece_capacity(self, dtype: torch.dtype) -> int:
        """Elements that fit into a piece. A slot has one piece for each rank."""
        return self._slot // self._size // dtype.itemsize

    def views(self, dtype: torch.dtype, length: int) -> tuple[SlotViews, SlotViews]:
        """The slots, as tensors of `length` elements."""
        found = self._slot_views.get((dtype, length))
        return found or _keep(self._slot_views, (dtype, length), self._make_slots)

    def piece_views(
        self, dtype: torch.dtype, length: int
    ) -> tuple[PieceViews, PieceViews]:
        """The pieces of the slots, as tensors of `length` elements."""
        found = self._piece_views.get((dtype, length))
        return found or _keep(self._piece_views, (dtype, length), self._make_pieces)

    def close(self) -> None:
        """Drop all views. Safe to call twice."""
        self._slot_views.clear()
        self._piece_views.clear()

    def _make_slots(self, parity: int, dtype: torch.dtype, length: int) -> SlotViews:
        share = -(-length // self._size // SHARE_ELEMENTS) * SHARE_ELEMENTS
        mine = slice(min(self._rank * share, length), (self._rank + 1) * share)
        slots = [self._view(parity, i, dtype)[:length] for i in range(self._size)]
        result = self._view(parity, self._size, dtype)[:length]
        return SlotViews(slots, [result], [slot[mine] for slot in slots], result[mine])

    def _make_pieces(self, parity: int, dtype: torch.dtype, length: int) -> PieceViews:
        return [
            [piece[:length] for piece in self._view(parity, i, dtype).chunk(self._size)]
            for i in range(self._size)
        ]

    def _view(self, parity: int, index: int, dtype: torch.dtype) -> Tensor:
        start = (parity * (self._size + 1) + index) * self._slot
        return self._bytes[start : start + self._slot].view(dtype)


def _keep(
    cache: dict[_Kind, tuple[_View, _View]],
    key: _Kind,
    make: Callable[[int, torch.dtype, int], _View],
) -> tuple[_View, _View]:
    if len(cache) >= _CACHED_VIEWS:  # lengths may never repeat
        cache.clear()
    made = cache[key] = (make(0, *key), make(1, *key))
    return made


def peer_bytes(size: int, slot: int) -> int:
    """Bytes of each of `size` ranks: two sets of a slot and a share of the result."""
    return slots_bytes(size, slot) // size


class PeerSlots(Slots):
    """Slots in each rank's own memory, which all ranks may read.

    Each rank writes only to its own memory, so that a failing rank cannot change the
    memory of other ranks. If each rank has a GPU, the reads are spread over all GPUs.
    """

    def __init__(self, memories: Sequence[Tensor], rank: int) -> None:
        """Use `peer_bytes(...)` bytes of memory of each rank, in rank order."""
        super().__init__(memories[rank], rank, len(memories))
        self._memories = list(memories)
        self._pitch = len(memories[rank]) // 2
        self._slot = self._pitch // (self._size + 1) * self._size

    def close(self) -> None:
        super().close()
        self._memories.clear()
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _make_slots(self, parity: int, dtype: torch.dtype, length: int) -> SlotViews:
        share = -(-length // self._size // SHARE_ELEMENTS) * SHARE_ELEMENTS
        edges = [min(rank * share, length) for rank in range(self._size + 1)]
        mine = slice(edges[self._rank], edges[self._rank + 1])
        slots = [self._view(parity, rank, dtype)[:length] for rank in range(self._size)]
        results = [
            self._share(parity, rank, dtype)[: edges[rank + 1] - edges[rank]]
            for rank in range(self._size)
        ]
        return SlotViews(
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
