"""The data part of the shared segment: slots, and the views of them that are in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = [
    "SHARE_ELEMENTS",
    "Grid",
    "PeerSlots",
    "Place",
    "Slots",
    "peer_bytes",
    "rounded_slot",
    "slots_bytes",
]

_PAGE = 4096
SHARE_ELEMENTS = 64
"""Shares begin at multiples of this: two ranks never write to one cache line."""
_CACHED_VIEWS = 512


class Place(NamedTuple):
    """Where one step's data lies, as views of one dtype and length."""

    slots: list[Tensor]
    """One per rank, written by that rank alone."""
    results: list[Tensor]
    """One after the other, the result; written by all ranks, each its own share."""
    shares: list[Tensor]
    """This rank's share of each slot; may be empty."""
    share: Tensor
    """This rank's share of the result; may be empty."""


Grid = list[list[Tensor]]
"""grid[source][target]: one step's data where each rank has some for each other."""
_View = TypeVar("_View")


def slots_bytes(size: int, slot: int) -> int:
    """Shared memory for `size` ranks: two places of a slot per rank and a result."""
    return 2 * (size + 1) * rounded_slot(size, slot)


def rounded_slot(size: int, slot: int) -> int:
    """Bytes of a slot: at least `slot`, in whole pages for each of `size` ranks."""
    return max(-(-slot // size // _PAGE), 1) * _PAGE * size


class Slots:
    """Views of memory that all ranks map: made once for each dtype and length.

    Each comes as a pair, for even and odd steps.
    """

    def __init__(self, memory: Tensor, rank: int, size: int) -> None:
        """Divide `slots_bytes(...)` bytes of memory among the ranks."""
        self._rank, self._size = rank, size
        self._bytes = memory
        self._slot = len(memory) // (2 * (size + 1))
        self._places: dict[tuple[torch.dtype, int], tuple[Place, Place]] = {}
        self._grids: dict[tuple[torch.dtype, int], tuple[Grid, Grid]] = {}

    def capacity(self, dtype: torch.dtype) -> int:
        """Elements that fit into a slot."""
        return self._slot // dtype.itemsize

    def piece_capacity(self, dtype: torch.dtype) -> int:
        """Elements that fit into a slot for each rank."""
        return self._slot // self._size // dtype.itemsize

    def places(self, dtype: torch.dtype, length: int) -> tuple[Place, Place]:
        """Slots of `length` elements."""
        found = self._places.get((dtype, length))
        return found or _keep(self._places, (dtype, length), self._make_place)

    def grids(self, dtype: torch.dtype, length: int) -> tuple[Grid, Grid]:
        """Pieces of `length` elements."""
        found = self._grids.get((dtype, length))
        return found or _keep(self._grids, (dtype, length), self._make_grid)

    def close(self) -> None:
        """Let go of all views. Safe to call twice."""
        self._places.clear()
        self._grids.clear()

    def _make_place(self, parity: int, dtype: torch.dtype, length: int) -> Place:
        share = -(-length // self._size // SHARE_ELEMENTS) * SHARE_ELEMENTS
        mine = slice(min(self._rank * share, length), (self._rank + 1) * share)
        slots = [self._view(parity, i, dtype)[:length] for i in range(self._size)]
        result = self._view(parity, self._size, dtype)[:length]
        return Place(slots, [result], [slot[mine] for slot in slots], result[mine])

    def _make_grid(self, parity: int, dtype: torch.dtype, length: int) -> Grid:
        return [
            [piece[:length] for piece in self._view(parity, i, dtype).chunk(self._size)]
            for i in range(self._size)
        ]

    def _view(self, parity: int, index: int, dtype: torch.dtype) -> Tensor:
        start = (parity * (self._size + 1) + index) * self._slot
        return self._bytes[start : start + self._slot].view(dtype)


def _keep(
    cache: dict[tuple[torch.dtype, int], tuple[_View, _View]],
    key: tuple[torch.dtype, int],
    make: Callable[[int, torch.dtype, int], _View],
) -> tuple[_View, _View]:
    if len(cache) >= _CACHED_VIEWS:  # lengths that never repeat
        cache.clear()
    made = cache[key] = (make(0, *key), make(1, *key))
    return made


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
