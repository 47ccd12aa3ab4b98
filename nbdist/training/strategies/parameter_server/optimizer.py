"""The optimizer of a replica whose parameters are with servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..wrapped_optimizer import Delegate

__all__ = ["PushOptimizer"]


class PushOptimizer(Delegate):
    """Pushes gradients and takes parameters, where another one would compute.

    Args:
        inner: the optimizer that the servers run. Here it only has the options.
        push: takes each parameter group's options, and does it.
    """

    def __init__(
        self, inner: Optimizer, push: Callable[[Sequence[dict[str, Any]]], None]
    ) -> None:
        super().__init__(inner)
        self._push = push

    @torch.no_grad()
    def exchange(self) -> None:
        """Push, and wait for what the servers answer."""
        self._push(
            [
                {name: value for name, value in group.items() if name != "params"}
                for group in self.param_groups
            ]
        )
