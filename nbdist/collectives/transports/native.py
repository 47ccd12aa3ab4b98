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

_EDITION = 5
"""Version of the compiled module's interface. An old build may have another one."""
_PLANS = 512


def find_compiled() -> ModuleType | None:
    """The compiled module; None if it is missing or has another interface."""
    try:
        found = importlib.import_module("nbdist.collectives._native")
    except ImportError:
        return None
    return found if getattr(found, "EDITION", 0) == _EDITION else None


class CompiledReduction(Protocol):
    """A reduction of tensors of one dtype and length.

    A call returns one of four values:

    - True: the call is done.
    - False: the fingerprints differ, and no data has changed.
    - None: a rank is late or has left, or the barrier was stopped. `resume` continues
      the call.
    - NotImplemented: the call has not started, because a tensor has another dtype or
      length, lies outside host memory, is not dense, or is of a subclass.
    """

    def run(self, tensor: Tensor, fingerprint: int) -> bool | None:
        """Reduce a tensor in place; for the operation `reduce`, on the root only."""

    def run_lists(
        self, output: Tensor, inputs: Sequence[Tensor], fingerprint: int
    ) -> bool | None:
        """Reduce `inputs[r]` of all ranks into rank r's output."""

    def resume(self) -> bool | None:
        """Continue the call that has returned None."""


class QuickCalls(Protocol):
    """All-reduces in C, on tensors of the dtypes and shapes that `keep` was given."""

    ticket: int
    """The last call's ticket in the group's log."""
    waiting: object | None
    """The reduction of the current call; None if there is no call."""

    def keep(
        self,
        op: object,
        shape: tuple[int, ...],
        reduction: CompiledReduction,
        fingerprint: int,
        text: bytes,
    ) -> None:
        """Make `all_reduce` handle tensors of this shape and of the reduction's dtype.

        Args:
            op: The reduce-op as the user gives it.
            shape: The tensors' shape.
            reduction: An all-reduce of the same number of elements.
            fingerprint: The fingerprint of the call's signature.
            text: The text of the call's signature, for the log.
        """

    def all_reduce(self, tensor: object, op: object) -> bool | None:
        """Reduce a tensor in place, if no rank is late.

        Returns:
            True if the call is done. False if no call was started, because the tensor
            is not dense, its dtype and shape were not given to `keep`, or `hold` was
            called. None if the call was started and a rank is late. The caller then
            calls `resume` until the call has ended, and `release`.
        """

    def resume(self) -> bool | None:
        """Continue the call that has returned None. See `CompiledReduction`."""

    def hold(self) -> bool:
        """Prevent new calls of `all_reduce` until `release`.

        Returns:
            False if a call is under way; `hold` then has no effect.
        """

    def release(self) -> None:
        """End one `hold`."""


class CompiledReductions:
    """The plan cache of one group's compiled reductions."""

    def __init__(self, native: ModuleType, barrier: object, at_once_bytes: int) -> None:
        """Make an empty cache.

        Args:
            native: The compiled module.
            barrier: The group's `Barrier` of that module.
            at_once_bytes: Larger tensors are reduced in shares, one for each rank. No
                more than a slot's.
        """
        self._native, self._barrier = native, barrier
        self.at_once_bytes = at_once_bytes
        self._kernels = {name: index for index, name in enumerate(native.KERNELS)}
        self._operations = {
            "all_reduce": native.ALL_REDUCE,
            "reduce": native.REDUCE,
            "reduce_scatter": native.REDUCE_SCATTER,
        }
        self.plans: dict[object, CompiledReduction | None] = {}
        """The reductions by operation, reduce-op, dtype, length and root; None if there
        is no kernel."""

    def quick_calls(self, log: object) -> QuickCalls:
        """The group's quick calls.

        Args:
            log: The group's compiled `CallLog`, which records the calls.
        """
        quick: QuickCalls = self._native.QuickCalls(self._barrier, log)
        return quick

    def plan(
        self, operation: str, op: str, dtype: torch.dtype, length: int, root: int = 0
    ) -> CompiledReduction | None:
        """The reduction of tensors of `length` elements; None if there is no kernel.

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
            self.at_once_bytes,
            root,
        )
        return made
