"""An optimizer that stands before another one and changes what a step means."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from nbdist.errors import UsageError

__all__ = ["Delegate", "trained_parameters"]


class Delegate(Optimizer):
    """Another optimizer's parameters, options and state, and a step of its own.

    It is an `Optimizer` of its own, so that learning rate schedulers and gradient
    scalers take it.

    Args:
        inner: the optimizer that does the arithmetic.

    Raises:
        UsageError: `inner` evaluates the loss several times in a step.
    """

    inner: Optimizer

    def __init__(self, inner: Optimizer) -> None:
        if isinstance(inner, LBFGS):
            raise UsageError(
                "LBFGS evaluates the loss several times in a step, and a strategy "
                "exchanges gradients once: take SGD, Adam or another first-order one"
            )
        # Not Optimizer.__init__, for the groups and the state are the other one's. This
        # makes the hooks that an optimizer has.
        self.__setstate__({"inner": inner, "defaults": inner.defaults})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups: what a scheduler changes, it changes there."""
        return self.inner.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The inner optimizer's state."""
        return self.inner.state

    def __getstate__(self) -> dict[str, Any]:
        # Hooks stay behind, and a `step` that a scheduler has bound to this object.
        return {
            name: value
            for name, value in self.__dict__.items()
            if name != "step" and not name.endswith("_hooks")
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, as far as this rank holds it."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, on this rank."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the strategy has counted the parameters already."""
        raise UsageError("add parameter groups before strategy.setup, not after")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with the other replicas. Each of them must call.

        Args:
            closure: evaluates the loss once, gradients included.

        Returns:
            What the closure has returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.exchange()
        return loss

    @abstractmethod
    def exchange(self) -> None:
        """The step, with the gradients in place."""


def trained_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups that want gradients, in their order."""
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
