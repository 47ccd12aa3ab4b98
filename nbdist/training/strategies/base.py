"""What every strategy offers: one way to write a training that several ranks do.

The shape is tf.distribute's, with Lightning Fabric's `setup`: a strategy takes model
and optimizer and gives back what to train with; the loop stays the user's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
from nbdist.training.validation import whole_number

from .replica_sampler import Divide

__all__ = ["Strategy", "begin_alike"]

Result = TypeVar("Result")
REDUCTIONS = ("sum", "mean", "min", "max")


class Strategy(ABC):
    """How ranks train one model together. All ranks make the same calls on it.

    A rank that computes gradients is a *replica*; in most strategies all ranks are.
    """

    def __init__(self) -> None:
        self._batches: Loader | None = None

    @property
    def replica(self) -> int | None:
        """This rank's number among the replicas; None on one that is none."""
        return default_group().rank

    @property
    def num_replicas(self) -> int:
        """How many ranks compute gradients."""
        return default_group().size

    @abstractmethod
    def setup(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[nn.Module, Optimizer]:
        """What to train with in place of a model and its optimizer.

        Every rank must call. All begin with rank 0's parameters and buffers, which are
        changed in place.

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
        """A loader of this replica's shares of global batches, as `nbdist.loader`'s.

        Every sample is in one replica's share; the last batch may be a smaller one. A
        replica for which nothing is left there gets a batch of no samples, so that all
        take equally many steps.

        Args:
            dataset: map-style, the same on all ranks.
            global_batch_size: samples of all replicas together in one step.
            shuffle: a new order in each epoch, the same on all ranks.
            seed: of the order.
            drop_last: leave out a last batch that is not full.
            collate_fn, num_workers: as DataLoader's.
        """
        order = Divide(
            dataset,
            global_batch_size,
            self._place,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        how = Fetching(
            collate=collate_fn or default_collate,
            workers=whole_number("num_workers", num_workers, 0),
        )
        self._batches = Loader(dataset, how, order, global_batch_size, self._place)
        return self._batches

    def _place(self) -> tuple[int, int]:
        """(replica, number of replicas), as they are now."""
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
            args, kwargs: what to call it with.

        Returns:
            What it returned here.
        """
        return fn(*args, **(kwargs or {}))

    def reduce(self, op: str, value: Any) -> Any:
        """One value out of every replica's. Every replica must call.

        Args:
            op: "sum", "mean", "min" or "max".
            value: a number, a tensor of equal shape on all replicas, or a list, tuple
                or dict of these.

        Returns:
            The same on all: floats for numbers, and new tensors.
        """
        if op not in REDUCTIONS:
            raise UsageError(f"reduce({op!r}, ...): expected one of {REDUCTIONS}")
        return tree_map(lambda leaf: self._reduce_leaf(op, leaf), value)

    def _reduce_leaf(self, op: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._combine(op, leaf.detach().clone())
        if isinstance(leaf, (int, float)):
            return self._combine(op, torch.tensor(leaf, dtype=torch.float64)).item()
        raise UsageError(
            f"reduce() got a {type(leaf).__name__}: expected numbers and tensors"
        )

    def _combine(self, op: str, tensor: Tensor) -> Tensor:
        """Reduce a tensor of this strategy's own over the replicas."""
        all_reduce(tensor, op)
        return tensor

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of `run` that this process has: here a process is one replica."""
        return (value,)

    def average_loss(
        self, per_example_loss: Tensor, global_batch_size: int | None = None
    ) -> Tensor:
        """A loss whose gradients, averaged over the replicas, are the global mean's.

        The plain mean of each replica's share would give a sample in a smaller share
        more weight. This stays exact for shares of any size, also of none.

        Args:
            per_example_loss: any shape, the first dimension counting this replica's
                samples, as of `cross_entropy(..., reduction="none")`.
            global_batch_size: samples of all replicas together. Default: those of the
                batch that came last out of `distribute`'s loader.

        Returns:
            A scalar: the sum over this replica's samples, times the replicas, through
            the global batch size. Its mean over the replicas is the global mean loss.

        Raises:
            UsageError: no size is given, and no loader has handed out a batch.
        """
        if global_batch_size is None:
            global_batch_size = self._batches.in_hand if self._batches else 0
        if global_batch_size < 1:
            raise UsageError(
                "average_loss: expected a global batch size of 1 or more: give it, or "
                "take the batches from this strategy's distribute()"
            )
        values_per_sample = math.prod(per_example_loss.shape[1:])
        share = self.num_replicas / (global_batch_size * values_per_sample)
        return per_example_loss.sum() * share


def begin_alike(model: nn.Module) -> None:
    """Give all ranks rank 0's parameters and buffers, in place. All must call.

    Raises:
        UsageError: the model's backward meets all ranks; this strategy's does not.
    """
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            "the model is in DistributedDataParallel, which averages gradients over "
            "all ranks itself: give setup the module, model.module, and its optimizer"
        )
    root = default_group().ranks[0]
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            broadcast(tensor, root)
