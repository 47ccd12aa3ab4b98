"""Keras callbacks for distributed training with `model.fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from nbdist.errors import UsageError
from nbdist.horovod.basics import rank, size
from nbdist.horovod.ops.allreduce import allreduce
from nbdist.keras.variables import broadcast_global_variables
from nbdist.training.keras_models import check_backend

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ModelCheckpoint",
]

Logs = dict[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Copies one rank's weights and optimizer state to all ranks when training starts.

    The existing variables are sent before the first batch. All variables are sent again
    after the first batch, because layers and optimizers may create variables in it.
    Every rank must use it.

    Args:
        root_rank: The world rank whose variables are sent.
    """

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        check_backend()
        self.root_rank = root_rank
        self._done = False

    def on_train_begin(self, logs: Logs = None) -> None:
        self._done = False  # an earlier training may have ended on some ranks only
        if self.model.built:
            broadcast_global_variables(self.root_rank, self.model)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self._done:
            self._done = True
            broadcast_global_variables(self.root_rank, self.model)


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces an epoch's metrics by their averages over the ranks.

    Every rank must use it. Put it before callbacks that use metrics, such as
    `ReduceLROnPlateau`.
    """

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        for name in sorted(logs or {}):
            assert logs is not None
            value = torch.tensor(float(logs[name]), dtype=torch.float64)
            logs[name] = allreduce(value, name=f"metric.{name}").item()


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies the initial learning rate by a factor that depends on the epoch.

    Args:
        initial_lr: The initial learning rate.
        multiplier: The factor, or a function that returns it for an epoch.
        start_epoch: The first epoch whose rate is set.
        end_epoch: The epoch after the last whose rate is set; None for no end.
        staircase: Whether the rate changes only at the start of an epoch. If False, it
            changes at each batch, and `multiplier` gets a fractional epoch.
        momentum_correction: Whether the momentum is scaled with the rate for one batch
            after a change (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
        steps_per_epoch: The number of batches of an epoch. Default: that of `fit`.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        check_backend()
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._multiplier = multiplier
        self._epoch = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        self._restore_momentum()  # an earlier training may have ended within a batch

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        ended = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or ended:
            return
        if not self.staircase:
            self._set_rate(self._epoch + batch / self._steps())
        elif batch == 0:
            self._set_rate(self._epoch)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._restore_momentum()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def factor(self, epoch: float) -> float:
        """The factor of the initial rate."""
        if callable(self._multiplier):
            return self._multiplier(epoch)
        return self._multiplier

    def _restore_momentum(self) -> None:
        if self._momentum is not None:
            self.model.optimizer.momentum = self._momentum
            self._momentum = None

    def _steps(self) -> int:
        steps = self.steps_per_epoch or self.params.get("steps")
        if not steps:
            raise UsageError(
                "the number of batches of an epoch is not known: pass steps_per_epoch= "
                "to the callback"
            )
        return int(steps)

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = float(optimizer.learning_rate)
        after = self.initial_lr * self.factor(epoch)
        optimizer.learning_rate = after
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and momentum and before:
            self._momentum = momentum
            optimizer.momentum = min(1.0, momentum * after / before)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size()` to `initial_lr`, by batches.

    A rate that is scaled with the number of ranks is too large for the first epochs
    (Goyal et al., "Accurate, Large Minibatch SGD", 2017).

    Args:
        initial_lr: The scaled rate, such as `0.01 * hvd.size()`.
        warmup_epochs: Epochs until `initial_lr` is reached.
        momentum_correction, steps_per_epoch: As for `LearningRateScheduleCallback`.
        verbose: 1 to print a line on rank 0 when `initial_lr` is reached.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._rise,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs, self.verbose = warmup_epochs, verbose

    def _rise(self, epoch: float) -> float:
        # One batch ahead, so that the last batch of the warm-up has the full rate.
        epoch += 1 / self._steps()
        return 1 / size() * (epoch * (size() - 1) / self.warmup_epochs + 1)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == self.warmup_epochs - 1 and rank() == 0:
            reached = float(self.model.optimizer.learning_rate)
            print(f"epoch {epoch + 1}: the learning rate has reached {reached:g}")


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's `ModelCheckpoint`. It saves on rank 0 only."""

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if rank() == 0:
            super().on_epoch_end(epoch, logs)
