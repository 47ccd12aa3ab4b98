"""DistributedOptimizer with Adasum: each rank steps, and the steps are combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nbdist.errors import UsageError

from ._allreduce import grouped_allreduce_
from ._compression import Compressor
from ._process_sets import ProcessSet
from ._reduce_ops import Adasum

__all__ = ["AdasumOptimizer"]


class AdasumOptimizer:
    """What the subclass of an optimizer's class does differently.

    The step that the optimizer would take is the gradient of Adasum (section 4 of the
    paper), so that momentum and Adam's scaling are in it.
    """

    _compression: type[Compressor]
    _process_set: ProcessSet
    _passes: int
    _passes_left: int
    param_groups: list[dict[str, Any]]

    @staticmethod
    def prepare(
        optimizer: Any,
        compression: type[Compressor],
        passes: int,
        process_set: ProcessSet,
    ) -> None:
        """Set what an instance knows beyond its base class."""
        vars(optimizer).update(_compression=compression, _process_set=process_set)
        optimizer.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Of Horovod's interface: gradients add up until `step` is called."""
        if passes < 1:
            raise UsageError(f"backward_passes_per_step {passes}: expected 1 or more")
        self._passes = passes

    def synchronize(self) -> None:
        """Nothing: there is nothing to wait for before the step."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Not with Adasum, whose gradients stay each rank's own.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "skip_synchronize() has no meaning with op=hvd.Adasum: clip each rank's "
            "own gradients, then call step()"
        )
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the combined step. Every rank must call."""
        parameters = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        starts = [parameter.detach().clone() for parameter in parameters]
        base: Any = super()
        loss = base.step() if closure is None else base.step(closure)
        self._combine(parameters, starts)
        return loss

    @torch.no_grad()
    def _combine(self, parameters: list[Tensor], starts: list[Tensor]) -> None:
        if not parameters:
            return
        packed = [
            self._compression.compress(parameter - start)
            for parameter, start in zip(parameters, starts, strict=True)
        ]
        steps = grouped_allreduce_(
            [step for step, _ in packed], op=Adasum, process_set=self._process_set
        )
        for parameter, start, step, (_, context) in zip(
            parameters, starts, steps, packed, strict=True
        ):
            parameter.copy_(start + self._compression.decompress(step, context))
