"""Collectives through memory that the ranks of one host share.

A tensor goes through in blocks that stay in the cores' caches, so that main memory sees
each element about once in and once out. All ranks move from step to step together, by
way of the gate; each step has one of two places for its data, in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from ._gate_shared import SharedGate
from ._reduction import reduce_rows
from ._transport import Transport

if TYPE_CHECKING:
    from ._connect import Hooks

__all__ = ["SharedTransport", "memory_bytes"]

_ALIGNMENT = 4096
_ONE_SHOT_BYTES = 32 * 1024
"""Above this, with three ranks or more, each rank reduces only its own share."""
_CACHED_PLACES = 512


def memory_bytes(size: int, slot: int) -> int:
    """Shared memory for `size` ranks: two places of a slot per rank and a result."""
    piece = max(-(-slot // size // _ALIGNMENT), 1) * _ALIGNMENT
    return 2 * (size + 1) * piece * size


class Place(NamedTuple):
    """Where one step's data lies."""

    slots: list[Tensor]
    """One per rank, written by that rank alone."""
    result: Tensor
    """Written by all ranks, each its own piece."""


Action = Callable[[int, Place], None]


class SharedTransport(Transport):
    """Each rank writes what others need into its slot, and they read it there."""

    description: ClassVar[str] = "shared memory"
    meets: ClassVar[bool] = True

    def __init__(self, gate: SharedGate, memory: memoryview, hooks: Hooks) -> None:
        """Use `memory_bytes(...)` bytes that all ranks of the gate map."""
        self._gate, self._hooks = gate, hooks
        self._rank, self._size = gate.rank, gate.size
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._slot = len(memory) // (2 * (self._size + 1))
        self._places: dict[tuple[torch.dtype, int], tuple[Place, Place]] = {}

    # -- operations ----------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._size > 2 and size > _ONE_SHOT_BYTES:
            self._reduce_by_shares(tensor, op, wanted=True)
        elif size <= self._slot:
            self._reduce_at_once(tensor, op, wanted=True)
        else:
            self._reduce_everywhere(tensor, op)

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        wanted = self._rank == root
        if tensor.numel() * tensor.element_size() <= _ONE_SHOT_BYTES:
            self._reduce_at_once(tensor, op, wanted)
        else:
            self._reduce_by_shares(tensor, op, wanted)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str) -> None:
        blocks = [self._cut(each, self._size) for each in inputs]
        outputs = self._cut(output, self._size)

        def write(step: int, place: Place) -> None:
            pieces = self._pieces(place.slots[self._rank])
            for piece, block in zip(pieces, blocks, strict=True):
                piece[: len(block[step])].copy_(block[step])

        def read(step: int, place: Place) -> None:
            block = outputs[step]
            rows = [self._pieces(s)[self._rank][: len(block)] for s in place.slots]
            reduce_rows(op, rows, block)

        self._run(len(outputs), output.dtype, write, read)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        outputs = None if self._rank == root else tensor
        self._publish(tensor, [root], {} if outputs is None else {root: outputs})

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        others = {r: out for r, out in enumerate(outputs) if r != self._rank}
        self._publish(tensor, range(self._size), others)
        outputs[self._rank].copy_(tensor)

    def gather(
        self, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int
    ) -> None:
        others = {r: out for r, out in enumerate(outputs or ()) if r != root}
        self._publish(tensor, [r for r in range(self._size) if r != root], others)
        if outputs is not None:
            outputs[root].copy_(tensor)

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int
    ) -> None:
        receives = {} if self._rank == root else {root: tensor}
        self._deal(inputs, receives, tensor.numel(), tensor.dtype)
        if inputs is not None:
            tensor.copy_(inputs[root])

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], longest: int
    ) -> None:
        others = {r: out for r, out in enumerate(outputs) if r != self._rank}
        self._deal(inputs, others, longest, outputs[0].dtype)
        outputs[self._rank].copy_(inputs[self._rank])

    def close(self) -> None:
        self._places.clear()

    # -- reductions ----------------------------------------------------------------

    def _reduce_at_once(self, tensor: Tensor, op: str, wanted: bool) -> None:
        """One step: everybody writes all of it, everybody reduces all of it."""
        places = self._place_pair(tensor.dtype, tensor.numel())
        slots = places[self._gate.step & 1].slots
        slots[self._rank].copy_(tensor)
        self._hooks.meet()
        if wanted:
            reduce_rows(op, slots, tensor)

    def _reduce_everywhere(self, tensor: Tensor, op: str) -> None:
        """The same in blocks: for two ranks no scheme moves less."""
        blocks = self._cut(tensor)

        def write(step: int, place: Place) -> None:
            block = blocks[step]
            place.slots[self._rank][: len(block)].copy_(block)

        def read(step: int, place: Place) -> None:
            block = blocks[step]
            rows = [slot[: len(block)] for slot in place.slots]
            rows[self._rank] = block  # equal to the slot's, and in this core's cache
            reduce_rows(op, rows, block)

        self._run(len(blocks), tensor.dtype, write, read)

    def _reduce_by_shares(self, tensor: Tensor, op: str, wanted: bool) -> None:
        """Each rank reduces its piece of each block; then all copy the results.

        Three things go on in one step, each for another block: copying one in, reducing
        the one before and copying out the one before that.
        """
        blocks = self._cut(tensor)
        places = self._place_pair(tensor.dtype, self._slot // tensor.element_size())
        for step in range(len(blocks) + 2):
            now, before = places[self._gate.step & 1], places[~self._gate.step & 1]
            if step >= 2 and wanted:
                block = blocks[step - 2]
                block.copy_(now.result[: len(block)])
            if step < len(blocks):
                block = blocks[step]
                now.slots[self._rank][: len(block)].copy_(block)
            if 1 <= step <= len(blocks):
                self._reduce_share(op, before, len(blocks[step - 1]))
            if step == 0:
                self._hooks.meet()
            elif step <= len(blocks):
                self._gate.pass_through(self._hooks.check)

    def _reduce_share(self, op: str, place: Place, length: int) -> None:
        share = -(-length // self._size)
        start = min(self._rank * share, length)
        stop = min(start + share, length)
        if start < stop:
            rows = [slot[start:stop] for slot in place.slots]
            reduce_rows(op, rows, place.result[start:stop])

    # -- moving --------------------------------------------------------------------

    def _publish(
        self, tensor: Tensor, sources: Sequence[int], outputs: dict[int, Tensor]
    ) -> None:
        """The ranks in `sources` show their tensor; each rank copies what it wants."""
        blocks = self._cut(tensor)
        cut = {source: self._cut(output) for source, output in outputs.items()}

        def write(step: int, place: Place) -> None:
            if self._rank in sources:
                place.slots[self._rank][: len(blocks[step])].copy_(blocks[step])

        def read(step: int, place: Place) -> None:
            for source, wanted in cut.items():
                block = wanted[step]
                block.copy_(place.slots[source][: len(block)])

        self._run(len(blocks), tensor.dtype, write, read)

    def _deal(
        self,
        inputs: Sequence[Tensor] | None,
        outputs: dict[int, Tensor],
        longest: int,
        dtype: torch.dtype,
    ) -> None:
        """Each rank with inputs shows one to each other rank."""
        steps = -(-longest // self._elements(dtype, self._size))
        offered = [self._cut(each, self._size) for each in inputs or []]
        cut = {source: self._cut(out, self._size) for source, out in outputs.items()}

        def write(step: int, place: Place) -> None:
            pieces = self._pieces(place.slots[self._rank])
            for target, blocks in enumerate(offered):
                if target != self._rank and step < len(blocks):
                    pieces[target][: len(blocks[step])].copy_(blocks[step])

        def read(step: int, place: Place) -> None:
            for source, blocks in cut.items():
                if step < len(blocks):
                    piece = self._pieces(place.slots[source])[self._rank]
                    blocks[step].copy_(piece[: len(blocks[step])])

        self._run(steps, dtype, write, read)

    # -- steps ---------------------------------------------------------------------

    def _run(self, steps: int, dtype: torch.dtype, write: Action, read: Action) -> None:
        """Write, meet, read, for each step; a call of no steps meets once."""
        if steps == 0:
            self._hooks.meet()
        places = self._place_pair(dtype, self._elements(dtype))
        for step in range(steps):
            place = places[self._gate.step & 1]
            write(step, place)
            if step == 0:
                self._hooks.meet()
            else:
                self._gate.pass_through(self._hooks.check)
            read(step, place)

    def _elements(self, dtype: torch.dtype, parts: int = 1) -> int:
        return self._slot // parts // dtype.itemsize

    def _cut(self, tensor: Tensor, parts: int = 1) -> Sequence[Tensor]:
        """Blocks that fill a slot, or a piece of one; none for an empty tensor."""
        if tensor.numel() == 0:
            return ()
        return tensor.split(self._elements(tensor.dtype, parts))

    def _pieces(self, slot: Tensor) -> Sequence[Tensor]:
        """A slot as one piece for each rank."""
        return slot.split(self._elements(slot.dtype, self._size))

    def _place_pair(self, dtype: torch.dtype, length: int) -> tuple[Place, Place]:
        """Both places, as the first `length` elements of each slot."""
        found = self._places.get((dtype, length))
        if found is None:
            if len(self._places) >= _CACHED_PLACES:  # lengths that never repeat
                self._places.clear()
            found = (self._place(0, dtype, length), self._place(1, dtype, length))
            self._places[dtype, length] = found
        return found

    def _place(self, which: int, dtype: torch.dtype, length: int) -> Place:
        first = which * (self._size + 1)
        views = [
            self._bytes[(first + i) * self._slot :][: length * dtype.itemsize].view(
                dtype
            )
            for i in range(self._size + 1)
        ]
        return Place(views[:-1], views[-1])
