"""Horovod's elastic training, over `nbdist.elastic`."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from nbdist.horovod.basics import init
from nbdist.training.data.sampler import rank_and_size
from nbdist.training.elastic.run import run as elastic_run
from nbdist.training.elastic.state import State

__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function continue after a rank's death and after a resize.

    This is `nbdist.elastic.run` with its defaults. `hvd.rank()` and `hvd.size()` may
    differ each time the function starts.

    Args:
        func: Its first argument is a `TorchState`.
    """

    @functools.wraps(func)
    def begin(state: State, *args: Any, **kwargs: Any) -> Any:
        init()
        return func(state, *args, **kwargs)

    return elastic_run(begin)


class TorchState(State):
    """A `nbdist.elastic.State` with Horovod's constructor.

    Args:
        model, optimizer: A commit copies their `state_dict()`.
        kwargs: Further values, such as `epoch=0`. Each is an attribute.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        given: dict[str, Any] = {"model": model, "optimizer": optimizer}
        known = {name: value for name, value in given.items() if value is not None}
        super().__init__(None, 1, **known, **kwargs)

    @classmethod
    def _is_reserved(cls, name: str) -> bool:
        # Scripts for Horovod count their commits in a value of this name.
        return name != "commits" and super()._is_reserved(name)

    @property
    def commits(self) -> Any:
        """The value of this name; without one, the number of the last commit."""
        return self._objects.get("commits", self._commit_number)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions without arguments, called after the ranks have changed.

        Every rank calls them.
        """
        for callback in callbacks:
            self.on_reset(functools.partial(_without_sizes, callback))


def _without_sizes(callback: Callable[[], Any], _old: int, _new: int) -> None:
    init()  # the callback may call hvd.rank() and hvd.size()
    callback()


class ElasticSampler(Sampler[int]):
    """Divides an epoch's samples among the ranks, and the rest after a change of ranks.

    Put it into the `TorchState`, call `record_batch` after each batch, and `set_epoch`
    at the end of each epoch. Every rank gets the same number of samples. Some samples
    may therefore be repeated at the end, as in torch's `DistributedSampler`.
    `nbdist.elastic.Sampler` repeats no sample.

    Args:
        dataset: A data set whose length does not change.
        shuffle: Use a new order in each epoch, which depends on `seed`. If False, use
            the data set's order.
        seed: The seed of the order, equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in which no sample is processed yet."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of `batch_size` samples that every rank has processed."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Divide the remaining samples among the present ranks."""
        self.rank, self.num_replicas = rank_and_size(None)
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of its samples that were processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a state, with the present ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        # Fewer samples than ranks may be left: they are repeated as often as needed.
        padded = itertools.cycle(self.remaining_indices)
        return itertools.islice(padded, self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
