"""LocalSGD: every rank trains by itself, and now and then the models are averaged."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nbdist.collectives import all_reduce
from nbdist.errors import UsageError

from .base import Strategy, begin_alike
from .flat_buffers import Pack
from .wrapped_optimizer import Delegate, trained_parameters

__all__ = ["LocalSGD"]


class LocalSGD(Strategy):
    """Averages the ranks' parameters after every k-th step.

    Between two averagings nothing is sent. With `every=1` and plain SGD this is
    synchronous SGD to rounding. With `every=None` it averages when the training calls
    `average`, such as at the end of each epoch or once at the end (Zinkevich et al.,
    "Parallelized Stochastic Gradient Descent", NIPS 2010; McMahan et al.,
    "Communication-Efficient Learning of Deep Networks", AISTATS 2017,
    arXiv:1602.05629). On averaging every k steps: Zhou and Cong, "On the Convergence
    Properties of a K-step Averaging SGD", IJCAI 2018, arXiv:1708.01012; Stich, "Local
    SGD Converges Fast and Communicates Little", ICLR 2019, arXiv:1805.09767.

    Floating-point buffers, such as BatchNorm's running statistics, are averaged too.

    Args:
        every: steps between two averagings; None for averaging by hand.
        optimizer_state: average the optimizer's state too, such as momenta, after Yu,
            Jin and Yang, "On the Linear Speedup Analysis of Communication Efficient
            Momentum SGD for Distributed Non-Convex Optimization", ICML 2019,
            arXiv:1905.03817; otherwise each rank keeps its own.

    Raises:
        UsageError: `every` is no number of steps.
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
        """The model itself, and an optimizer that averages. Every rank must call.

        All ranks must take equally many steps, as they do over `distribute`'s batches.
        """
        begin_alike(model)
        self._model, self._optimizer = model, optimizer
        return model, _AveragingOptimizer(optimizer, self)

    def average(self) -> None:
        """Average now: parameters, buffers and, if wanted, state. Every rank must call.

        Raises:
            UsageError: `setup` was not called.
        """
        if self._model is None or self._optimizer is None:
            raise UsageError("average(): call setup(model, optimizer) first")
        tensors = trained_parameters(self._optimizer)
        tensors += [each for each in self._model.buffers() if each.is_floating_point()]
        if self.optimizer_state:
            tensors += _state_of(self._optimizer)
        pack = Pack(tensors)
        pack.fill(tensors)
        for buffer in pack.buffers:
            all_reduce(buffer, "mean")
        pack.spill(tensors)


class _AveragingOptimizer(Delegate):
    """Steps by itself, and averages after every k-th step."""

    def __init__(self, inner: Optimizer, strategy: LocalSGD) -> None:
        super().__init__(inner)
        self._strategy = strategy
        self._steps = 0

    @torch.no_grad()
    def exchange(self) -> None:
        """The rank's own step, and an averaging when it is due."""
        self.inner.step()
        self._steps += 1
        every = self._strategy.every
        if every is not None and self._steps % every == 0:
            self._strategy.average()


def _state_of(optimizer: Optimizer) -> list[Tensor]:
    """The state that can be averaged, in an order that is the same on all ranks."""
    return [
        value
        for parameter in trained_parameters(optimizer)
        for _, value in sorted(optimizer.state[parameter].items())
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
    ]
