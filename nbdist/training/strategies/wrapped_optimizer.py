"""An optimizer that wraps another optimizer and replaces its step."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from nbdist.errors import UsageError

__all__ = ["WrappedOptimizer", "trained_parameters"]


class WrappedOptimizer(Optimizer):
    """Wraps an optimizer and replaces its step. Everything else is the inner one's.

    A wrapped optimizer is an `Optimizer`, so learning rate schedulers and gradient
    scalers accept it. Derived classes implement `exchange`.

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
                "exchanges gradients once: use SGD, Adam or another first-order one"
            )
        # Optimizer.__init__ would replace the groups and the state by new ones.
        # __setstate__ makes the hooks of an optimizer, and keeps those of `inner`.
        self.__setstate__({"inner": inner, "defaults": inner.defaults})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups, in which a scheduler changes options."""
        return self.inner.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The inner optimizer's state."""
        return self.inner.state

    def __getstate__(self) -> dict[str, Any]:
        # Hooks cannot be pickled, nor can a `step` that a scheduler has replaced.
        return {
            name: value
            for name, value in self.__dict__.items()
            if name != "step" and not name.endswith("_hooks")
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's `state_dict`, with the state that this rank holds."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` on this rank."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError, because the strategy has distributed its parameters."""
        raise UsageError("add parameter groups before strategy.setup, not after")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step together with the other replicas. Every replica must call.

        Args:
            closure: computes the gradients, and returns the loss. It is called once.

        Returns:
            The result of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.exchange()
        return loss

    @abstractmethod
    def exchange(self) -> None:
        """Take the step. It is called when the gradients are computed."""


def trained_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups that require gradients, in their order."""
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
