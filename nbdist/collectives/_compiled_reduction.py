"""All-reduce in shared memory by the compiled part, which makes no tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ._gate_shared import SharedGate
from ._hooks import Hooks
from ._slots import Place, Slots
from ._transport import Reduction

__all__ = ["AT_ONCE_BYTES", "CompiledReductions"]

AT_ONCE_BYTES = 32 * 1024
"""Above this, each rank reduces only its own share."""


class _Addresses(NamedTuple):
    """Where one block goes through, at even or at odd steps."""

    slot: int
    """Of this rank."""
    result: int
    before: tuple[int, ...]
    """This rank's share of the block, in the slots of lower ranks."""
    after: tuple[int, ...]
    """The same of higher ranks."""


class _Block(NamedTuple):
    """A run of the tensor that goes through the slots together. Counted in bytes."""

    start: int
    size: int
    low: int
    """This rank's share of it begins here."""
    high: int
    """And ends here."""
    places: tuple[_Addresses, _Addresses]


class CompiledReductions:
    """Makes the all-reduces of one group: one for each op, dtype and length."""

    def __init__(
        self, native: ModuleType, gate: SharedGate, slots: Slots, hooks: Hooks
    ) -> None:
        """Use the gate and the slots of a transport.

        Args:
            native: the compiled part.
            gate: where the ranks meet; it tells which of two places is in use.
            slots: where the data goes through.
            hooks: the group's.
        """
        self._native, self._gate, self._slots, self._hooks = native, gate, slots, hooks
        self._kernels = {name: index for index, name in enumerate(native.KERNELS)}

    def make(
        self, op: str, dtype: torch.dtype, length: int, word: int
    ) -> Reduction | None:
        """One for tensors of `length` elements; None where no kernel was compiled."""
        name = f"{op} {str(dtype).removeprefix('torch.')}"
        kernel = self._kernels.get(name)
        if kernel is None or self._gate.size > self._native.MOST_ROWS:
            return None
        size = length * dtype.itemsize
        if size <= AT_ONCE_BYTES and length <= self._slots.capacity(dtype):
            return self._at_once(kernel, self._slots.places(dtype, length), size, word)
        return self._by_shares(kernel, self._cut(dtype, length), dtype.itemsize, word)

    def _at_once(
        self, kernel: int, places: tuple[Place, Place], size: int, word: int
    ) -> Reduction:
        """All ranks show all of their tensor, and all reduce all of it."""
        rows = [tuple(slot.data_ptr() for slot in place.slots) for place in places]
        own = [each[self._gate.rank] for each in rows]
        length = len(places[0].slots[0])
        crossing, meet = self._gate.crossing, self._meet(word)
        copy, reduce = self._native.copy, self._native.reduce

        def reduction(tensor: Tensor) -> None:
            address, parity = tensor.data_ptr(), crossing.step & 1
            copy(own[parity], address, size)
            meet()
            reduce(kernel, (address,), rows[parity], length)

        return reduction

    def _by_shares(
        self, kernel: int, blocks: list[_Block], itemsize: int, word: int
    ) -> Reduction:
        """Each rank shows the others their shares and reduces its own, block by block.

        In one step a rank reduces its share of a block, takes the others' results of
        the block before, and shows the block after.
        """
        crossing, meet = self._gate.crossing, self._meet(word)
        arrive, check = self._gate.arrive, self._hooks.check
        copy, reduce = self._native.copy, self._native.reduce

        def copy_others(block: _Block, target: int, source: int) -> None:
            copy(target, source, block.low)
            copy(target + block.high, source + block.high, block.size - block.high)

        def show(block: _Block, base: int, parity: int) -> None:
            copy_others(block, block.places[parity].slot, base + block.start)

        def combine(block: _Block, base: int, parity: int) -> None:
            place, own = block.places[parity], base + block.start + block.low
            length = (block.high - block.low) // itemsize
            outs = (own, place.result + block.low)
            reduce(kernel, outs, (*place.before, own, *place.after), length)

        def take(block: _Block, base: int, parity: int) -> None:
            copy_others(block, base + block.start, block.places[parity].result)

        def reduction(tensor: Tensor) -> None:
            base, parity = tensor.data_ptr(), crossing.step & 1
            show(blocks[0], base, parity)
            meet()
            for step, block in enumerate(blocks):
                combine(block, base, parity)
                if step:
                    take(blocks[step - 1], base, 1 - parity)
                if step + 1 < len(blocks):
                    show(blocks[step + 1], base, 1 - parity)
                arrive(0, check)
                parity = 1 - parity
            take(blocks[-1], base, 1 - parity)

        return reduction

    def _meet(self, word: int) -> Callable[[], None]:
        arrive, check = self._gate.arrive, self._hooks.check
        differ = self._hooks.differ

        def meet() -> None:
            if not arrive(word, check):
                differ()

        return meet

    def _cut(self, dtype: torch.dtype, length: int) -> list[_Block]:
        longest = self._slots.capacity(dtype)
        return [
            self._block(dtype, start, min(longest, length - start))
            for start in range(0, length, longest)
        ]

    def _block(self, dtype: torch.dtype, start: int, length: int) -> _Block:
        places = self._slots.places(dtype, length)
        low = places[0].share.data_ptr() - places[0].results[0].data_ptr()
        high = low + places[0].share.numel() * dtype.itemsize
        size = length * dtype.itemsize
        if low == high:  # nothing of it is this rank's
            low = high = size
        even, odd = (self._addresses(place) for place in places)
        return _Block(start * dtype.itemsize, size, low, high, (even, odd))

    def _addresses(self, place: Place) -> _Addresses:
        rank = self._gate.rank
        shares = tuple(share.data_ptr() for share in place.shares)
        slot, result = place.slots[rank].data_ptr(), place.results[0].data_ptr()
        return _Addresses(slot, result, shares[:rank], shares[rank + 1 :])
