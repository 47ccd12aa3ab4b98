"""Compiled reductions: one call checks, passes the barrier and reduces."""

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

_EDITION = 3
"""Of the compiled part's interface. A changed checkout may have an older one."""
_PLANS = 512


def find_compiled() -> ModuleType | None:
    """The compiled part; None where it is missing or of another edition."""
    try:
        found = importlib.import_module("nbdist.collectives._native")
    except ImportError:
        return None
    return found if getattr(found, "EDITION", 0) == _EDITION else None


class CompiledReduction(Protocol):
    """A reduction of tensors of one dtype and length.

    A call returns True when it is done, and False where fingerprints differ and no data
    was touched. It returns None where a rank is late or has left, or the barrier was
    stopped; `resume` continues it. It returns NotImplemented, and has not started, for
    a tensor of another kind, outside of host memory, not dense, or of a subclass.
    """

    def run(self, tensor: Tensor, fingerprint: int) -> bool | None:
        """Reduce a tensor in place, or for `reduce` into the root's."""

    def run_lists(
        self, output: Tensor, inputs: Sequence[Tensor], fingerprint: int
    ) -> bool | None:
        """Reduce `inputs[r]` of all ranks into rank r's output."""

    def resume(self) -> bool | None:
        """Continue the call that has returned None."""


class QuickCalls(Protocol):
    """All-reduces on tensors of known kinds, without a wait for a late rank."""

    count: int
    """The number of calls started."""
    waiting: object | None
    """The reduction of the call under way; None where there is none."""

    def keep(
        self,
        op: object,
        shape: tuple[int, ...],
        reduction: CompiledReduction,
        fingerprint: int,
    ) -> None:
        """Make `all_reduce` handle tensors of this shape and of the reduction's dtype.

        Args:
            op: The reduce-op as the user gives it.
            shape: The tensors' shape.
            reduction: An all-reduce of the same number of elements.
            fingerprint: Of the call's signature.
        """

    def all_reduce(self, tensor: object, op: object) -> bool | None:
        """Reduce a tensor in place, if that is possible without a wait.

        Returns:
            True when it is done. False where no call was started: the tensor is not
            dense or not of a known kind, or calls are held. None where the call was
            started and a rank is late: `resume` until it has ended, then `release`.
        """

    def resume(self) -> bool | None:
        """Continue the call that has returned None. See `CompiledReduction`."""

    def hold(self) -> bool:
        """Keep `all_reduce` from starting calls until `release`.

        Returns:
            False where a call is under way, and `hold` has no effect.
        """

    def release(self) -> None:
        """End one `hold`."""


class CompiledReductions:
    """The plan cache of one group's compiled reductions."""

    def __init__(self, native: ModuleType, barrier: object, at_once_bytes: int) -> None:
        """Make an empty cache.

        Args:
            native: The compiled part.
            barrier: Its Barrier, of the group.
            at_once_bytes: Larger tensors are reduced in shares, one for each rank.
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
        """By operation, reduce-op, dtype, length and root. None: there is no kernel."""

    def plan(
        self, operation: str, op: str, dtype: torch.dtype, length: int, root: int = 0
    ) -> CompiledReduction | None:
        """The reduction of tensors of `length` elements; None where there is no kernel.

        The answer is the same on all ranks.
        """
        key = operation, op, dtype, length, root
        if key not in self.plans:
            if len(self.plans) >= _PLANS:  # lengths may never repeat
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
