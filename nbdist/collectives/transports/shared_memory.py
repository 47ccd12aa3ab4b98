"""Collectives through memory that the ranks of one host share.

A tensor is moved in blocks that fit into the cores' caches, so that each element is
read from main memory once and written to it once. All ranks pass the barrier between
two steps. Even and odd steps use different sets of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from nbdist.collectives.reduction import reduce_rows
from nbdist.collectives.sync.shared_barrier import SharedBarrier
from nbdist.collectives.sync.wait import Hooks
from nbdist.collectives.transports.base import Transport
from nbdist.collectives.transports.native import CompiledReduction, CompiledReductions
from nbdist.collectives.transports.slots import PieceViews, Slots, SlotViews

__all__ = ["AT_ONCE_BYTES", "SharedTransport"]

AT_ONCE_BYTES = 32 * 1024
"""Tensors above this size are reduced in shares, one for each rank."""

View = TypeVar("View", SlotViews, PieceViews)
Item = TypeVar("Item")


class SharedTransport(Transport):
    """Each rank writes to its own slot, and reads the slots of the other ranks."""

    description: ClassVar[str] = "shared memory"
    has_barrier: ClassVar[bool] = True
    at_once_bytes: int = AT_ONCE_BYTES
    """Tensors above this size are reduced in shares, one for each rank."""

    def __init__(
        self,
        barrier: SharedBarrier,
        slots: Slots,
        hooks: Hooks,
        compiled: CompiledReductions | None = None,
    ) -> None:
        """Use slots that all ranks of the barrier map.

        Args:
            barrier: the group's barrier.
            slots: the group's slots.
            hooks: the group's hooks.
            compiled: the compiled reductions; None, on all ranks, if a rank lacks them.
        """
        self._barrier, self._hooks = barrier, hooks
        self._rank, self._size = barrier.rank, barrier.size
        self._slots = slots
        self._compiled = compiled
        if compiled is not None:
            # A rank whose tensor is strided does in Python what others do in C. Both
            # must divide the tensor at the same size.
            self.at_once_bytes = compiled.at_once_bytes

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        if self._compiled is not None:
            key = "all_reduce", op, tensor.dtype, tensor.numel(), 0
            plan = self._compiled.plans.get(key) or self._compiled.plan(*key)
            if plan is not None:
                done = plan.run(tensor, self._hooks.fingerprint)
                if done is True or self._finish(plan, done):
                    return
        super().all_reduce(tensor, op)

    def all_reduce_flat(self, tensor: Tensor, op: str) -> None:
        self._reduce(tensor, op, wanted=True)

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        plan = self._plan("reduce", op, tensor, root)
        if plan is not None:
            done = plan.run(tensor, self._hooks.fingerprint)
            if self._finish(plan, done):
                return
        self._reduce(tensor, op, wanted=self._rank == root)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str) -> None:
        plan = self._plan("reduce_scatter", op, output)
        if plan is not None:
            done = plan.run_lists(output, inputs, self._hooks.fingerprint)
            if self._finish(plan, done):
                return
        cut = [self._cut_pieces(each) for each in inputs]
        outputs = self._cut_pieces(output)

        def write(step: int, views: PieceViews) -> None:
            for piece, blocks in zip(views[self._rank], cut, strict=True):
                piece.copy_(blocks[step])

        def read(step: int, views: PieceViews) -> None:
            rows = [pieces[self._rank] for pieces in views]
            reduce_rows(op, rows, outputs[step])

        lengths = [len(block) for block in outputs]
        self._run(lengths, output.dtype, self._slots.piece_views, write, read)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        outputs = {} if self._rank == root else {root: tensor}
        self._publish(tensor, [root], outputs)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        self._publish(tensor, range(self._size), self._others(outputs))
        outputs[self._rank].copy_(tensor)

    def gather(
        self, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int
    ) -> None:
        sources = [rank for rank in range(self._size) if rank != root]
        self._publish(tensor, sources, self._others(outputs or ()))
        if outputs is not None:
            outputs[root].copy_(tensor)

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int
    ) -> None:
        outputs = {} if self._rank == root else {root: tensor}
        self._deal(inputs or (), outputs, len(tensor), tensor.dtype)
        if inputs is not None:
            tensor.copy_(inputs[root])

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], longest: int
    ) -> None:
        self._deal(inputs, self._others(outputs), longest, outputs[0].dtype)
        outputs[self._rank].copy_(inputs[self._rank])

    def abort(self) -> None:
        self._barrier.wake()

    def close(self) -> None:
        self._slots.close()

    # -- compiled reductions -------------------------------------------------------

    def _plan(
        self, operation: str, op: str, tensor: Tensor, root: int = 0
    ) -> CompiledReduction | None:
        if self._compiled is None:
            return None
        return self._compiled.plan(operation, op, tensor.dtype, tensor.numel(), root)

    def _finish(self, plan: CompiledReduction, done: bool | None) -> bool:
        """Wait for the end of a compiled call. Returns False if it was not started.

        Raises:
            CollectiveMismatch: The ranks made different calls.
        """
        if done is NotImplemented:
            return False
        if done is None:
            done = self._barrier.wait(self._hooks.check, plan.resume)
        if not done:
            self._hooks.differ()
        return True

    # -- reductions ----------------------------------------------------------------

    def _reduce(self, tensor: Tensor, op: str, wanted: bool) -> None:
        if len(tensor) * tensor.element_size() <= self.at_once_bytes:
            self._reduce_at_once(tensor, op, wanted)
        else:
            self._reduce_by_shares(tensor, op, wanted)

    def _reduce_at_once(self, tensor: Tensor, op: str, wanted: bool) -> None:
        """Reduce each block in one step: each rank writes its own, and reduces all."""
        for step, block in enumerate(self._cut(tensor) or (tensor,)):
            views = self._slots.views(tensor.dtype, len(block))
            slots = views[self._parity].slots
            slots[self._rank].copy_(block)
            self._pass(first=step == 0)
            if wanted:
                reduce_rows(op, slots, block)

    def _reduce_by_shares(self, tensor: Tensor, op: str, wanted: bool) -> None:
        """Reduce in blocks. Each rank reduces its share of a block for all ranks.

        Each step works on three blocks: it copies one into the slot, reduces the block
        before, and copies out the block before that.
        """
        blocks = self._cut(tensor)
        views = [self._slots.views(tensor.dtype, len(block)) for block in blocks]
        for step in range(len(blocks) + 2):
            parity = self._parity
            if step >= 2 and wanted:
                self._copy_out(views[step - 2][parity].results, blocks[step - 2])
            if step < len(blocks):
                views[step][parity].slots[self._rank].copy_(blocks[step])
            if 1 <= step <= len(blocks):
                ready = views[step - 1][1 - parity]
                reduce_rows(op, ready.shares, ready.share)
            if step <= len(blocks):
                self._pass(first=step == 0)

    def _copy_out(self, results: Sequence[Tensor], block: Tensor) -> None:
        """Copy the results, in order, into `block`."""
        block.copy_(results[0])  # in shared memory, one tensor holds all shares

    # -- copies --------------------------------------------------------------------

    def _publish(
        self, tensor: Tensor, sources: Sequence[int], outputs: dict[int, Tensor]
    ) -> None:
        """Copy the tensors of the ranks in `sources`.

        Args:
            tensor: this rank's tensor, written if this rank is a source.
            sources: the ranks that write their tensor.
            outputs: for each rank whose tensor this rank reads, the tensor to copy to.
        """
        blocks = self._cut(tensor)
        wanted = [(source, self._cut(output)) for source, output in outputs.items()]

        def write(step: int, views: SlotViews) -> None:
            if self._rank in sources:
                views.slots[self._rank].copy_(blocks[step])

        def read(step: int, views: SlotViews) -> None:
            for source, output in wanted:
                output[step].copy_(views.slots[source])

        self._run_blocks(blocks, write, read)

    def _deal(
        self,
        inputs: Sequence[Tensor],
        outputs: dict[int, Tensor],
        longest: int,
        dtype: torch.dtype,
    ) -> None:
        """Copy one tensor from each rank to each other rank. Lengths may differ.

        Args:
            inputs: for each rank, the tensor that it reads; empty if no rank reads.
            outputs: for each rank whose tensor this rank reads, the tensor to copy to.
            longest: elements of the longest tensor of all ranks.
            dtype: dtype of all tensors.
        """
        offered = self._others([self._cut_pieces(each) for each in inputs])
        wanted = {source: self._cut_pieces(each) for source, each in outputs.items()}

        def write(step: int, views: PieceViews) -> None:
            for target, blocks in offered.items():
                if step < len(blocks):
                    views[self._rank][target][: len(blocks[step])].copy_(blocks[step])

        def read(step: int, views: PieceViews) -> None:
            for source, blocks in wanted.items():
                if step < len(blocks):
                    blocks[step].copy_(views[source][self._rank][: len(blocks[step])])

        room = self._slots.piece_capacity(dtype)
        steps = -(-longest // room)
        self._run([room] * steps, dtype, self._slots.piece_views, write, read)

    # -- steps ---------------------------------------------------------------------

    def _run_blocks(
        self,
        blocks: Sequence[Tensor],
        write: Callable[[int, SlotViews], None],
        read: Callable[[int, SlotViews], None],
    ) -> None:
        lengths = [len(block) for block in blocks]
        dtype = blocks[0].dtype if blocks else torch.uint8
        self._run(lengths, dtype, self._slots.views, write, read)

    def _run(
        self,
        lengths: Sequence[int],
        dtype: torch.dtype,
        views: Callable[[torch.dtype, int], tuple[View, View]],
        write: Callable[[int, View], None],
        read: Callable[[int, View], None],
    ) -> None:
        """In each step write, pass the barrier and read; without steps pass it once."""
        if not lengths:
            self._pass(first=True)
        for step, length in enumerate(lengths):
            view = views(dtype, length)[self._parity]
            write(step, view)
            self._pass(first=step == 0)
            read(step, view)

    @property
    def _parity(self) -> int:
        """The set of slots of this step: 0 or 1."""
        return self._barrier.semaphores.step & 1

    def _pass(self, first: bool) -> None:
        """Pass the barrier, which compares fingerprints in the first step of a call."""
        if first:
            self._hooks.pass_barrier()
        else:
            self._barrier.pass_through(self._hooks.check)

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        return _cut(tensor, self._slots.capacity(tensor.dtype))

    def _cut_pieces(self, tensor: Tensor) -> Sequence[Tensor]:
        return _cut(tensor, self._slots.piece_capacity(tensor.dtype))

    def _others(self, tensors: Sequence[Item]) -> dict[int, Item]:
        return {rank: each for rank, each in enumerate(tensors) if rank != self._rank}


def _cut(tensor: Tensor, length: int) -> Sequence[Tensor]:
    """Cut into blocks of `length` elements; the last may be shorter."""
    blocks: Sequence[Tensor] = tensor.split(length) if len(tensor) else ()
    return blocks
