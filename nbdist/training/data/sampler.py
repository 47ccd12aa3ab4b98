"""Which samples each rank gets: every sample once an epoch, whatever the world's size.

The order of an epoch depends on the seed and the epoch alone. Global batches are cut
from it one after the other, and each rank takes its share of each. So the order, and
the global batch that an optimizer step sees, stay the same when the world changes its
size, and what is left of an epoch is divided anew.
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

__all__ = ["Sampler", "epoch_order", "place_in", "share_of"]


def epoch_order(
    length: int, seed: int, epoch: int, *, shuffle: bool
) -> npt.NDArray[np.int64]:
    """The indices 0 to length-1 (int64), in the order of one epoch.

    Equal arguments give an equal order, on every rank and in every run. Different
    (seed, epoch) are mixed by numpy's `SeedSequence`, so that epoch 1 of seed 0 is not
    epoch 0 of seed 1.
    """
    if not shuffle:
        return np.arange(length)
    return np.random.default_rng((seed, epoch)).permutation(length)


def share_of(length: int, rank: int, size: int) -> slice:
    """One rank's part of a global batch: contiguous, lengths differ by one at most.

    A batch shorter than the world leaves the last ranks without a sample.
    """
    return slice(*chunk_bounds(length, size)[rank])


def place_in(group: Group | None) -> tuple[int, int]:
    """(rank, size) of this process, as it is now: in a group, or in the world.

    A process that has joined no world is alone in its own.
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
    end of the epoch. All ranks yield equally many lists; in the last one a rank may
    find nothing, when fewer samples than ranks are left. The group is looked up at each
    `iter`: after a change of the world's size, the next one divides what is left.

    Iterating does not move `position`, for a loader fetches ahead of the training:
    whoever hands a batch to the training calls `advance`, as `nbdist.loader` does.

    Args:
        data: the data set, or its length.
        batch_size: samples of a global batch, all ranks together.
        shuffle: a new order each epoch; else the data set's own.
        seed: of the order, 0 or more; the same on all ranks.
        drop_last: leave out a last global batch that is not full.
        group: ranks to divide among; default those of the world, and this process
            alone where there is none.

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
        """Samples of this epoch that were handed out, all ranks together."""
        self._group = group

    @property
    def place(self) -> tuple[int, int]:
        """(rank, size): this process in the group, as it is now."""
        return place_in(self._group)

    def bounds(self) -> list[tuple[int, int]]:
        """(start, stop) in the epoch's order of the global batches from `position`."""
        starts = range(self.position, self.length, self.batch_size)
        bounds = [
            (start, min(start + self.batch_size, self.length)) for start in starts
        ]
        return [
            b for b in bounds if not self.drop_last or b[1] - b[0] == self.batch_size
        ]

    def __iter__(self) -> Iterator[list[int]]:
        rank, size = self.place
        order = epoch_order(self.length, self.seed, self.epoch, shuffle=self.shuffle)
        for start, stop in self.bounds():
            batch = order[start:stop]
            yield batch[share_of(len(batch), rank, size)].tolist()

    def __len__(self) -> int:
        """Global batches of a whole epoch."""
        full, rest = divmod(self.length, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    @property
    def next_size(self) -> int:
        """Samples in the next global batch, all ranks together; 0 at the end."""
        left = self.length - self.position
        if self.drop_last and left < self.batch_size:
            return 0
        return min(left, self.batch_size)

    def advance(self) -> None:
        """The next global batch is used. Every rank must call, once for each batch."""
        self.position += self.next_size

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; within it already, nothing happens.

        So a loop over epochs may call it each time, also where it goes on in the middle
        of one.
        """
        if whole_number("epoch", epoch, 0) != self.epoch:
            self.epoch, self.position = epoch, 0

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """Where the training is. Equal on all ranks."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "length": self.length,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was called, in a world of any size.

        Raises:
            UsageError: the state is that of a data set of another length.
        """
        if state["length"] != self.length:
            raise UsageError(
                f"the state is that of {state['length']} samples, and the data set has "
                f"{self.length}: load it with the data set that it was made with"
            )
        self.seed = state["seed"]
        self.epoch, self.position = state["epoch"], state["position"]
