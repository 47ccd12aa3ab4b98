"""The compiled reductions of a group: one call of C checks, meets and reduces."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "CompiledReduction",
    "CompiledReductions",
    "QuickCalls",
    "find_compiled",
]

_EDITION = 2
"""Of the compiled part: a checkout that was changed may still have an older one."""
_PLANS = 512


def find_compiled() -> ModuleType | None:
    """The compiled part, where the installation has one that fits this code."""
    try:
        found = importlib.import_module("nbdist.collectives._native")
    except ImportError:
        return None
    return found if getattr(found, "EDITION", 0) == _EDITION else None


class CompiledReduction(Protocol):
    """A reduction of tensors of one dtype and length.

    Its calls return True once they are done; False where a rank came with another
    fingerprint, and no data was touched; None where a rank is late, has left, or the
    barrier was stopped: `resume` goes on. They return NotImplemented, and have begun
    nothing, for a tensor that is not dense, in host memory, of exactly this kind and of
    no subclass.
    """

    def run(self, tensor: Tensor, fingerprint: int) -> bool | None:
        """Reduce a tensor in place; or into the root's, for `reduce`."""

    def run_lists(
        self, output: Tensor, inputs: Sequence[Tensor], fingerprint: int
    ) -> bool | None:
        """Reduce `inputs[r]` of all ranks into rank r's output."""

    def resume(self) -> bool | None:
        """Go on with the call that returned None."""


class QuickCalls(Protocol):
    """All-reduces of a group, on tensors of known kinds, that no rank is late for."""

    count: int
    """Calls that were begun."""
    waiting: object | None
    """What a rank is late for; None where no call is under way."""

    def keep(
        self,
        op: object,
        shape: tuple[int, ...],
        reduction: CompiledReduction,
        fingerprint: int,
    ) -> None:
        """Make `all_reduce` do the tensors of this shape and of the reduction's dtype.

        Args:
            op: What the user calls the reduce-op.
            shape: Of the tensors.
            reduction: An all-reduce of as many elements.
            fingerprint: What the ranks must agree on.
        """

    def all_reduce(self, tensor: object, op: object) -> bool | None:
        """Reduce a tensor in place, if this can be done at once.

        Returns:
            True once it is done. False where nothing was begun: this is no dense tensor
            of a known kind, or another call is held. None where the call was begun, and
            a rank is late: `resume` it until it has ended, and `release` then.
        """

    def resume(self) -> bool | None:
        """Go on with the call that returned None. See `CompiledReduction`."""

    def hold(self) -> bool:
        """Have `all_reduce` begin nothing until `release`.

        Returns:
            False where a call is under way, and nothing is held.
        """

    def release(self) -> None:
        """Take back one `hold`."""


class CompiledReductions:
    """The plan cache of one group's compiled reductions."""

    def __init__(self, native: ModuleType, barrier: object, at_once_bytes: int) -> None:
        """Make none yet.

        Args:
            native: The compiled part.
            barrier: Its Barrier, where the ranks meet.
            at_once_bytes: Up to this size, each rank reduces all of a tensor; above,
                only its own share of it.
        """
        self._native, self._barrier = native, barrier
        self._at_once_bytes = at_once_bytes
        self._kernels = {name: index for index, name in enumerate(native.KERNELS)}
        self._operations = {
            "all_reduce": native.ALL_REDUCE,
            "reduce": native.REDUCE,
            "reduce_scatter": native.REDUCE_SCATTER,
        }
        self.quick: QuickCalls = native.QuickCalls(barrier)
        self.plans: dict[object, CompiledReduction | None] = {}
        """By operation, reduce-op, dtype, length and root; None: no kernel for it."""

    def plan(
        self, operation: str, op: str, dtype: torch.dtype, length: int, root: int = 0
    ) -> CompiledReduction | None:
        """The reduction of tensors of `length` elements; None where there is no kernel.

        The answer is the same on all ranks.
        """
        key = operation, op, dtype, length, root
        if key not in self.plans:
            if len(self.plans) >= _PLANS:  # lengths that never repeat
                self.plans.clear()
            self.plans[key] = self._make(operation, op, dtype, length, root)
        return self.plans[key]

    def _make(
        self, operation: str, op: str, dtype: torch.dtype, length: int, root: int
    ) -> CompiledReduction | None:
        name = f"{op} {str(dtype).removeprefix('torch.')}"
        if name not in self._kernels:
            return None
        made: CompiledReduction = self._native.Reduction(
            self._barrier,
            self._operations[operation],
            self._kernels[name],
            length,
            self._at_once_bytes,
            root,
        )
        return made
