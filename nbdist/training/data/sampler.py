"""The sampler divides samples among the ranks, each sample once an epoch.

The order of an epoch depends only on the seed and the epoch. Global batches are
consecutive slices of that order, and each rank gets a part of each. When the world
changes its size, the order and the global batches stay the same, and the remaining
global batches are divided among the new ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler as TorchSampler

from nbdist.collectives import Group, chunk_bounds, default_group
from nbdist.errors import UsageError, WrongProcess
from nbdist.training.validation import whole_number

__all__ = ["Sampler", "epoch_order", "rank_and_size", "share_of"]


def epoch_order(
    length: int, seed: int, epoch: int, *, shuffle: bool
) -> npt.NDArray[np.int64]:
    """The indices 0 to length-1 (int64), in the order of one epoch.

    Equal arguments give an equal order on every rank and in every run. numpy's
    `SeedSequence` mixes seed and epoch, so that epoch 1 of seed 0 differs from epoch 0
    of seed 1.
    """
    if not shuffle:
        return np.arange(length)
    return np.random.default_rng((seed, epoch)).permutation(length)


def share_of(length: int, rank: int, size: int) -> slice:
    """One rank's part of a global batch. Lengths differ by at most one.

    If the batch has fewer samples than there are ranks, the last ranks' parts are
    empty.
    """
    return slice(*chunk_bounds(length, size)[rank])


def rank_and_size(group: Group | None) -> tuple[int, int]:
    """The current (rank, size) of this process in a group, by default in the world.

    They are (0, 1) in a process that is not a rank.
    """
    if group is None:
        try:
            group = default_group()
        except WrongProcess:
            return 0, 1
    return group.rank, group.size


class Sampler(TorchSampler[list[int]]):
    """A batch sampler that divides global batches among the ranks of a group.

    Iterating yields this rank's indices of each global batch, from `position` to the
    end of the epoch. All ranks yield the same number of lists. The last list may be
    empty, if fewer samples than ranks are left. Each `iter` reads the group's current
    size, so after a change of the world's size it divides the remaining global batches
    among the new ranks.

    Iterating does not change `position`, because a loader fetches ahead of the
    training. The loader calls `advance` when it yields a batch.

    Args:
        data: the data set, or its length.
        batch_size: samples of all ranks together in a global batch.
        shuffle: use a new order in each epoch. If False, use the data set's order.
        seed: seed of the order, 0 or more; the same on all ranks.
        drop_last: drop the last global batch if it is not full.
        group: the ranks that share the samples. Default: all ranks of the world, or
            this process alone if it is not a rank.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        group: Group | None = None,
    ) -> None:
        length = len(data) if isinstance(data, Sized) else data
        self.length = whole_number("data", length, 0)
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.shuffle = shuffle
        self.seed = whole_number("seed", seed, 0)
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0
        """Samples of this epoch that the training has used, of all ranks together."""
        self._group = group

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """The current (rank, size) of this process in the group."""
        return rank_and_size(self._group)

    def bounds(self) -> list[tuple[int, int]]:
        """(start, stop) of each global batch from `position`, in the epoch's order."""
        starts = range(self.position, self.length, self.batch_size)
        bounds = [
            (start, min(start + self.batch_size, self.length)) for start in starts
        ]
        return [
            b for b in bounds if not self.drop_last or b[1] - b[0] == self.batch_size
        ]

    def __iter__(self) -> Iterator[list[int]]:
        rank, size = self.rank_and_size
        order = epoch_order(self.length, self.seed, self.epoch, shuffle=self.shuffle)
        for start, stop in self.bounds():
            batch = order[start:stop]
            yield batch[share_of(len(batch), rank, size)].tolist()

    def __len__(self) -> int:
        """The number of global batches in a whole epoch."""
        full, rest = divmod(self.length, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    @property
    def next_size(self) -> int:
        """Samples of all ranks in the next global batch; 0 at the end of the epoch."""
        left = self.length - self.position
        if self.drop_last and left < self.batch_size:
            return 0
        return min(left, self.batch_size)

    def advance(self) -> None:
        """Count the next global batch as used. Call it once a batch on every rank."""
        self.position += self.next_size

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. In the current epoch, this has no effect.

        A loop over epochs may therefore call this in each round, also after it was
        resumed in the middle of an epoch.
        """
        if whole_number("epoch", epoch, 0) != self.epoch:
            self.epoch, self.position = epoch, 0

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """The position of the training. It is equal on all ranks."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "length": self.length,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position in a state, in a world of any size.

        Raises:
            UsageError: the state belongs to a data set of another length.
        """
        if state["length"] != self.length:
            raise UsageError(
                f"the state is that of {state['length']} samples, and the data set has "
                f"{self.length}: load the state with the data set it was saved with"
            )
        self.seed = state["seed"]
        self.epoch, self.position = state["epoch"], state["position"]
