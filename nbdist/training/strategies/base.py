"""The base class of all strategies.

Its interface is that of tf.distribute, with Lightning Fabric's `setup`: a strategy
takes a model and an optimizer, and returns those to train with. The training loop is
the user's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, default_collate

from nbdist.collectives import all_reduce, broadcast, default_group
from nbdist.errors import UsageError
from nbdist.training.data.fetch import Fetching
from nbdist.training.data.loader import Loader
from nbdist.training.strategies.replica_sampler import ReplicaSampler
from nbdist.training.validation import whole_number

__all__ = ["InputContext", "Strategy", "broadcast_model"]

Result = TypeVar("Result")
REDUCTIONS = ("sum", "mean", "min", "max")


@dataclass(frozen=True)
class InputContext:
    """Says which part of a data set a replica reads, as `tf.distribute.InputContext`.

    Each replica has an input pipeline of its own.
    """

    num_input_pipelines: int
    """The number of replicas."""
    input_pipeline_id: int
    """The number of this replica."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self.num_input_pipelines

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The number of samples in each replica's part of a global batch.

        Raises:
            UsageError: The parts would differ in size.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise UsageError(
                f"global_batch_size={global_batch_size} is not a multiple of the "
                f"{self.num_replicas_in_sync} replicas: use another size, or "
                "strategy.distribute(), which allows parts of different sizes"
            )
        return global_batch_size // self.num_replicas_in_sync


class Strategy(ABC):
    """A way in which ranks train one model together. All ranks make the same calls.

    A rank that computes gradients is a *replica*. In most strategies every rank is one.
    """

    device: torch.device | None = None
    """The device to which batches are copied; None for no copy."""

    def __init__(self) -> None:
        self._batches: Loader | None = None

    @property
    def replica(self) -> int | None:
        """The number of this rank among the replicas; None if it is not a replica."""
        return default_group().rank

    @property
    def num_replicas(self) -> int:
        """The number of ranks that compute gradients."""
        return default_group().size

    @property
    def num_replicas_in_sync(self) -> int:
        """tf.distribute's name of `num_replicas`."""
        return self.num_replicas

    def scope(self) -> AbstractContextManager[Strategy]:
        """Make `compile` and `fit` of Keras models in this block train on all ranks.

        Raises:
            UsageError: this strategy does not drive Keras's `fit`.
        """
        raise UsageError(
            f"{type(self).__name__} does not drive Keras's fit: use Mirrored, or your "
            "own loop with strategy.setup(model, optimizer)"
        )

    @abstractmethod
    def setup(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Return the model and the optimizer to train with. Every rank must call.

        Rank 0's parameters and buffers are copied to all ranks, in place.

        Args:
            model: on the device where this rank computes.
            optimizer: over the model's parameters, with the same groups on all ranks.
        """

    def distribute(
        self,
        dataset: Dataset[Any],
        global_batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> Loader:
        """Return a loader of this replica's part of each global batch.

        Each sample of a global batch goes to exactly one replica. The last batch may be
        smaller. A replica whose part is empty gets a batch without samples, so that all
        replicas take the same number of steps.

        Args:
            dataset: map-style, the same on all ranks.
            global_batch_size: samples of all replicas together in one step.
            shuffle: use a new order in each epoch, the same on all ranks.
            seed: seed of the order.
            drop_last: drop the last batch if it is not full.
            collate_fn, num_workers: as for `torch.utils.data.DataLoader`.
        """
        order = ReplicaSampler(
            dataset,
            global_batch_size,
            self._rank_and_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        how = Fetching(
            collate=collate_fn or default_collate,
            workers=whole_number("num_workers", num_workers, 0),
        )
        self._batches = Loader(
            dataset,
            how,
            order,
            global_batch_size,
            self._rank_and_size,
            device=self.device,
        )
        return self._batches

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Result]
    ) -> Result:
        """Return the data set that a function makes for this replica.

        Args:
            dataset_fn: gets an `InputContext`, and returns batches of this replica's
                part of the data. It divides the data itself. Pass the size of the
                global batch to `average_loss`.
        """
        replica, size = self._rank_and_size()
        return dataset_fn(InputContext(size, replica))

    def _rank_and_size(self) -> tuple[int, int]:
        """The current (replica, number of replicas)."""
        return self.replica or 0, self.num_replicas

    def run(
        self,
        fn: Callable[..., Result],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Result:
        """Call a function on every replica. Every rank must call.

        Args:
            fn: a training step, or a whole training.
            args, kwargs: arguments of `fn`.

        Returns:
            The result of `fn` on this rank.
        """
        return fn(*args, **(kwargs or {}))

    def reduce(self, op: str, value: Any, axis: int | None = None) -> Any:
        """Reduce a value over the replicas. Every replica must call.

        Args:
            op: "sum", "mean", "min" or "max", in small or capital letters.
            value: a number, a tensor of equal shape on all replicas, or a list, tuple
                or dict of these.
            axis: also reduce each tensor along this dimension, in which its size may
                differ between replicas. None for no dimension.

        Returns:
            The reduced value, equal on all replicas: a float for each number, and a new
            tensor for each tensor. With `axis`, "mean" is the mean of the elements of
            all replicas, each with the same weight.

        Raises:
            UsageError: `op` is not one of these, or a value has another type.
        """
        name = str(op).lower()
        if name not in REDUCTIONS:
            raise UsageError(f"reduce({op!r}, ...): expected one of {REDUCTIONS}")
        return tree_map(lambda leaf: self._reduce_leaf(name, leaf, axis), value)

    def _reduce_leaf(self, op: str, leaf: Any, axis: int | None) -> Any:
        if isinstance(leaf, Tensor) and axis is not None:
            return self._reduce_axis(op, leaf.detach(), axis)
        if isinstance(leaf, Tensor):
            return self._combine(op, leaf.detach().clone())
        if isinstance(leaf, (int, float)):
            return self._combine(op, torch.tensor(leaf, dtype=torch.float64)).item()
        raise UsageError(
            f"reduce() got a {type(leaf).__name__}: expected a number, a tensor, or a "
            "list, tuple or dict of these"
        )

    def _reduce_axis(self, op: str, tensor: Tensor, axis: int) -> Tensor:
        """Reduce a tensor along a dimension and over the replicas."""
        if not -tensor.dim() <= axis < tensor.dim():
            raise UsageError(
                f"reduce(axis={axis}) of a tensor of shape {tuple(tensor.shape)}: it "
                f"has {tensor.dim()} dimensions; axis=None reduces over replicas only"
            )
        if op == "min":
            return self._combine(op, tensor.amin(axis))
        if op == "max":
            return self._combine(op, tensor.amax(axis))
        total = self._combine("sum", tensor.sum(axis))
        if op == "sum":
            return total
        count = torch.tensor(tensor.shape[axis], dtype=torch.float64)
        return total / self._combine("sum", count).to(total)

    def _combine(self, op: str, tensor: Tensor) -> Tensor:
        """Reduce a tensor over the replicas; it may be overwritten."""
        all_reduce(tensor, op)
        return tensor

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The results of `run` in this process, which is one replica."""
        return (value,)

    def average_loss(
        self, per_example_loss: Tensor, global_batch_size: int | None = None
    ) -> Tensor:
        """Return a loss whose mean over the replicas is the mean over the global batch.

        The average of its gradients over the replicas is the gradient of the mean loss
        over the global batch. It is exact for parts of any size, also for empty ones. A
        plain mean over each replica's part would give samples in a smaller part more
        weight.

        Args:
            per_example_loss: the loss of each of this replica's samples, shape
                (samples, ...), as `cross_entropy(..., reduction="none")` returns.
            global_batch_size: samples of all replicas together. Default: the size of
                the last global batch of `distribute`'s loader.

        Returns:
            A scalar: the mean loss of each sample, summed over this replica's samples,
            times the number of replicas, divided by the global batch size.

        Raises:
            UsageError: the size is below 1, or it is not given and no loader of
                `distribute` has yielded a batch.
        """
        if global_batch_size is None:
            global_batch_size = self._batches.in_hand if self._batches else 0
        if global_batch_size < 1:
            raise UsageError(
                f"average_loss: global_batch_size is {global_batch_size}: pass 1 or "
                "more, or take the batches from this strategy's distribute()"
            )
        values_per_sample = math.prod(per_example_loss.shape[1:])
        share = self.num_replicas / (global_batch_size * values_per_sample)
        return per_example_loss.sum() * share


def broadcast_model(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks. Every rank must call.

    Raises:
        UsageError: the model is wrapped in DDP, which would average gradients a second
            time.
    """
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            "the model is wrapped in DistributedDataParallel, which averages gradients "
            "over all ranks itself: pass model.module and its optimizer to setup()"
        )
    root = default_group().ranks[0]
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            broadcast(tensor, root)
