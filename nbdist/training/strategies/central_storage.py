"""CentralStorage: one rank holds the parameters and the optimizer's state."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nbdist.collectives import broadcast, default_group, reduce
from nbdist.errors import UsageError
from nbdist.training.strategies.base import Strategy, broadcast_model
from nbdist.training.strategies.flat_buffers import FlatBuffers
from nbdist.training.strategies.wrapped_optimizer import (
    WrappedOptimizer,
    trained_parameters,
)

__all__ = ["CentralStorage"]


class CentralStorage(Strategy):
    """One rank keeps the parameters and the optimizer's state in its host's memory.

    In each step, gradients are averaged on that rank, the optimizer runs there, and all
    replicas read the new parameters. The optimizer's state takes memory on one host
    only, and on no GPU.

    Args:
        root: the rank that keeps the parameters. It computes gradients too.
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self.root = root

    def setup(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Return the model, and an optimizer whose step runs on the root.

        Every rank must call. The optimizer's `state_dict()` has state on the root only.

        Raises:
            UsageError: `root` is not a rank of the world.
        """
        ranks = default_group().ranks
        if self.root not in ranks:
            raise UsageError(f"root={self.root}: expected one of {list(ranks)}")
        broadcast_model(model)
        return model, _CentralOptimizer(optimizer, self.root)


class _CentralOptimizer(WrappedOptimizer):
    """Averages gradients on the root, steps there, and broadcasts the parameters."""

    def __init__(self, inner: Optimizer, root: int) -> None:
        super().__init__(inner)
        self._replica = trained_parameters(inner)
        self._root = root
        # A scheduler changes these options. The root copies them before its step.
        self._groups = [dict(group) for group in inner.param_groups]
        self._kept = self._replica
        if self._is_root:
            self._kept = _move_to_host(inner, self._replica)
        else:
            inner.state.clear()
        self._gradients = FlatBuffers(self._replica)
        self._values = FlatBuffers(self._replica)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The replica's parameters, with the options that the root's step uses."""
        return self._groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and options on the root, and only the options elsewhere."""
        self.inner.load_state_dict(state_dict)
        for mine, kept in zip(self._groups, self.inner.param_groups, strict=True):
            mine.update(_options(kept))
        if not self._is_root:
            self.inner.state.clear()

    @property
    def _is_root(self) -> bool:
        group = default_group()
        return group.ranks[group.rank] == self._root

    @torch.no_grad()
    def exchange(self) -> None:
        """Average gradients on the root, step there, and read the parameters back."""
        self._gradients.fill([parameter.grad for parameter in self._replica])
        for buffer in self._gradients.buffers:
            reduce(buffer, self._root, "mean")
        if self._is_root:
            self._step()
            self._values.fill(self._kept)
        for buffer in self._values.buffers:
            broadcast(buffer, self._root)
        if not self._is_root or self._kept is not self._replica:
            self._values.copy_to(self._replica)

    def _step(self) -> None:
        for mine, kept in zip(self._groups, self.inner.param_groups, strict=True):
            kept.update(_options(mine))
        self._gradients.set_gradients(self._kept)
        self.inner.step()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _move_to_host(optimizer: Optimizer, parameters: list[Tensor]) -> list[Tensor]:
    """Make an optimizer update copies of the parameters in host memory.

    Returns:
        The copies; the parameters themselves if they are in host memory already.
    """
    if all(parameter.device.type == "cpu" for parameter in parameters):
        return parameters
    host = {parameter: _pinned(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        group["params"] = [host.get(each, each) for each in group["params"]]
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    for parameter, values in optimizer.state.items():
        state[host.get(parameter, parameter)] = {
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
    optimizer.state = state
    return [host[parameter] for parameter in parameters]


def _pinned(parameter: Tensor) -> Tensor:
    copy = torch.empty_like(parameter, device="cpu", pin_memory=True)
    return copy.copy_(parameter.detach()).requires_grad_()
