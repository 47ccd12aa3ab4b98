"""OneDevice: each rank trains a model of its own, as one process does."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nbdist.errors import UsageError
from nbdist.training.device import own_device
from nbdist.training.strategies.base import Strategy
from nbdist.training.strategies.keras_fit import keras_scope
from nbdist.training.strategies.mirrored import is_device, named_device

__all__ = ["OneDevice"]


class OneDevice(Strategy):
    """One replica, on the device of this rank. Nothing is sent.

    A training loop that is written for another strategy then computes what one process
    computes. Each rank that uses it trains alone, on whole batches.

    Args:
        device: this rank's device, such as "cuda:0" or "/cpu:0". None for no check.

    Raises:
        UsageError: this rank computes on another device.
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        own = own_device()
        if device is not None and not is_device(named_device(device), own):
            raise UsageError(
                f"device={device!r}: this rank computes on {own}; leave device out to "
                "use it"
            )

    @property
    def replica(self) -> int:
        """0: this rank is the only replica."""
        return 0

    @property
    def num_replicas(self) -> int:
        """1."""
        return 1

    def setup(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Return the model and the optimizer unchanged."""
        return model, optimizer

    def scope(self) -> AbstractContextManager[Strategy]:
        """Leave Keras's `compile` and `fit` as they are: each rank trains alone."""
        return keras_scope(self)

    def _combine(self, op: str, tensor: Tensor) -> Any:
        return tensor
