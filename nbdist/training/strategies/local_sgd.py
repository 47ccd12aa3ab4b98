"""LocalSGD: every rank trains by itself, and parameters are averaged at intervals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nbdist.collectives import all_reduce
from nbdist.errors import UsageError
from nbdist.training import lasting
from nbdist.training.strategies.base import Strategy, broadcast_model
from nbdist.training.strategies.flat_buffers import FlatBuffers
from nbdist.training.strategies.wrapped_optimizer import (
    WrappedOptimizer,
    trained_parameters,
)

__all__ = ["LocalSGD"]


class LocalSGD(Strategy):
    """Averages the ranks' parameters after every k-th step.

    Ranks send nothing between two averages. With `every=1` and plain SGD, this equals
    synchronous SGD up to rounding. With `every=None`, the training calls `average`,
    for instance at the end of each epoch or once at the end (Zinkevich et al.,
    "Parallelized Stochastic Gradient Descent", NIPS 2010; McMahan et al.,
    "Communication-Efficient Learning of Deep Networks", AISTATS 2017,
    arXiv:1602.05629). On averaging every k steps: Zhou and Cong, "On the Convergence
    Properties of a K-step Averaging SGD", IJCAI 2018, arXiv:1708.01012; Stich, "Local
    SGD Converges Fast and Communicates Little", ICLR 2019, arXiv:1805.09767.

    Floating-point buffers, such as BatchNorm's running statistics, are averaged too.

    Args:
        every: steps between two averages; None to average only in `average`.
        optimizer_state: also average the optimizer's state, such as momenta, after Yu,
            Jin and Yang, "On the Linear Speedup Analysis of Communication Efficient
            Momentum SGD for Distributed Non-Convex Optimization", ICML 2019,
            arXiv:1905.03817. If False, each rank keeps its own state.

    Raises:
        UsageError: `every` is not a positive int or None.
    """

    def __init__(self, every: int | None = 1, *, optimizer_state: bool = False) -> None:
        super().__init__()
        if every is not None and (not isinstance(every, int) or every < 1):
            raise UsageError(f"every={every!r}: expected 1 or more steps, or None")
        self.every = every
        self.optimizer_state = optimizer_state
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None

    def setup(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Return the model, and an optimizer that averages. Every rank must call.

        All ranks must take the same number of steps, as they do with a loader from
        `distribute`.
        """
        broadcast_model(model)
        self._model, self._optimizer = model, optimizer
        return model, _AveragingOptimizer(optimizer, self)

    def average(self) -> None:
        """Average parameters and buffers now. Every rank must call.

        With `optimizer_state`, the optimizer's state is averaged too.

        Raises:
            UsageError: `setup` was not called.
        """
        if self._model is None or self._optimizer is None:
            raise UsageError("average(): call setup(model, optimizer) first")
        tensors = trained_parameters(self._optimizer)
        tensors += [each for each in self._model.buffers() if each.is_floating_point()]
        if self.optimizer_state:
            tensors += _state_of(self._optimizer)
        pack = FlatBuffers(tensors)
        pack.fill(tensors)
        for buffer in pack.buffers:
            all_reduce(buffer, "mean")
        pack.copy_to(tensors)


class _AveragingOptimizer(WrappedOptimizer):
    """Steps on each rank alone, and averages after every k-th step."""

    def __init__(self, inner: Optimizer, strategy: LocalSGD) -> None:
        super().__init__(inner)
        self._strategy = strategy
        self._steps = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        lasting.register(self)

    def _begin_again(self) -> None:
        self._steps = 0  # a rank may have taken one step more than another one

    @torch.no_grad()
    def exchange(self) -> None:
        """Step with this rank's gradients, and average if it is due."""
        self.inner.step()
        self._steps += 1
        every = self._strategy.every
        if every is not None and self._steps % every == 0:
            self._strategy.average()


def _state_of(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer state that can be averaged, in the same order on all ranks."""
    return [
        value
        for parameter in trained_parameters(optimizer)
        for _, value in sorted(optimizer.state[parameter].items())
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
    ]
