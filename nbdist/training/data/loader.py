"""Batches for this rank: divided, fetched ahead, on the device, and counted."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from nbdist.collectives import Group
from nbdist.errors import UsageError
from nbdist.ipc.resources import cores
from nbdist.training.data.device_prefetch import on_device
from nbdist.training.data.fetch import Collate, Fetching, Part, by_index, first_item
from nbdist.training.data.sampler import Sampler, place_in
from nbdist.training.data.stream import Division, StreamPosition, from_stream, is_stream
from nbdist.training.data.structure import emptied
from nbdist.training.data.wait_stats import Waits
from nbdist.training.validation import whole_number

__all__ = ["Loader", "loader"]

MOST_WORKERS = 4


class Loader:
    """Iterates over this rank's batches of an epoch; `nbdist.loader` makes one.

    So does a strategy's `distribute`. All ranks take equally many steps. A loop goes on
    where the last one has been left, and each epoch that was finished is followed by
    the next. Made for all ranks alike, each must loop over its own.
    """

    def __init__(
        self,
        dataset: Any,
        how: Fetching,
        sampler: Sampler | StreamPosition,
        batch_size: int | None,
        place: Callable[[], tuple[int, int]],
        *,
        drop_last: bool = False,
        device: torch.device | None = None,
        join: bool = False,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        """Knows the epoch and the position in it."""
        self.device = device
        """Where batches go; None for no particular one."""
        self.num_workers = how.workers
        self.global_batch_size = batch_size
        """Samples of all ranks; None where the data set's items are batches."""
        self.waits = Waits()
        """How long the steps waited for data; `print(loader.waits)` says it."""
        self._how, self._drop_last, self._join = how, drop_last, join
        self._place = place
        self.in_hand = 0
        """Samples of all ranks together in the batch handed out last."""
        self._local = 0
        self._size = 1
        self._loop: weakref.ref[Generator[Any, None, None]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy, as on a rank that joins, has begun no loop of its own.
        return {**self.__dict__, "_loop": None}

    def __iter__(self) -> Iterator[Any]:
        # An error's traceback may keep the last loop, and its workers, alive.
        left = None if self._loop is None else self._loop()
        if left is not None:
            left.close()
        loop = self._rest_of_epoch()
        self._loop = weakref.ref(loop)
        return loop

    def _rest_of_epoch(self) -> Generator[Any, None, None]:
        self._size = self._place()[1]
        parts = self._parts()
        if self.device is not None:
            parts = on_device(parts, self.device)
        try:
            self.waits.begin()
            while (part := next(parts, None)) is not None:
                self._count(part)
                if self._join and part.local == 0:
                    continue
                self.waits.arrive()
                yield part.batch if part.local else emptied(part.batch)
                self.waits.begin()
        finally:
            self.waits.leave()
        self.set_epoch(self.sampler.epoch + 1)

    def __len__(self) -> int:
        """Steps of a whole epoch.

        Raises:
            TypeError: the data are a stream that does not say its length.
        """
        total = self.global_batch_size or self._place()[1]
        full, rest = divmod(len(self.dataset), total)
        return full + (rest > 0 and not self._drop_last)

    def _parts(self) -> Iterator[Part]:
        rank, size = self._place()
        batch_size = self.global_batch_size or size
        if isinstance(self.sampler, Sampler):
            self.sampler.batch_size = batch_size
            return by_index(self.dataset, self.sampler, self._how)
        whose = Division(rank, size, batch_size, self.sampler.position, self._drop_last)
        return from_stream(self.dataset, whose, self._how)

    def _count(self, part: Part) -> None:
        """The part goes out: its global batch is used, on every rank."""
        self._local, self.in_hand = part.local, part.total
        self.sampler.position += part.total

    # -- the last batch --------------------------------------------------------------

    @property
    def weight(self) -> float:
        """What to multiply this rank's mean loss with, for the batch handed out last.

        Gradients that are then averaged over the ranks are those of the mean over the
        global batch, also where the ranks' parts differ in size. 1.0 where they do not,
        0.0 where this rank's part is empty: there take `average`, for a mean of nothing
        is not a number.
        """
        return self._local * self._size / self.in_hand if self.in_hand else 1.0

    def average(self, losses: Tensor) -> Tensor:
        """This rank's part of the mean loss over the global batch handed out last.

        Gradients of it, averaged over the ranks as DDP does, are those of that mean,
        whatever the sizes of the parts. No rank waits for another here.

        Args:
            losses: of each sample of this rank's batch, shape (batch, ...), as losses
                with `reduction="none"` give them; of a shape of its own, each sample's
                mean counts.

        Returns:
            A scalar on the device of `losses`; 0 where this rank's part is empty.
        """
        if len(losses) == 0:
            return losses.sum()
        return losses.mean() * self.weight

    # -- where it is -----------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; within it already, nothing happens.

        A data set that has a `set_epoch` of its own is told.
        """
        self.sampler.set_epoch(epoch)
        self._tell_dataset()

    def state_dict(self) -> dict[str, int]:
        """Where the loop is, as of the batch handed out last. Equal on all ranks."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, in a world of any size, with the next `for`."""
        self.sampler.load_state_dict(state)
        self._tell_dataset()

    def _tell_dataset(self) -> None:
        tell = getattr(self.dataset, "set_epoch", None)
        if tell is not None:
            tell(self.sampler.epoch)


def loader(
    dataset: Any,
    batch_size: int | None = None,
    *,
    global_batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    num_workers: int | str = "auto",
    pin_memory: bool | str = "auto",
    prefetch: int = 2,
    drop_last: bool = False,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    join: bool = False,
    group: Group | None = None,
) -> Loader:
    """Batches of a data set, divided among the ranks so that none comes twice.

    Every rank must make it, with equal arguments, and loop over it.

    Args:
        dataset: with `__getitem__` and `__len__`, in the order of `shuffle` and `seed`
            (see `nbdist.Sampler`); or a stream, that is an iterable, in its own order:
            every rank reads all of it and keeps each item i where i % size is its rank.
        batch_size: samples a rank gets in each step. The global batch is this times the
            ranks there are now, and stays when the world changes its size.
        global_batch_size: samples that all ranks get together, instead.
            Without either, the data set's items are batches already: a rank gets one.
        shuffle: a new order each epoch; nothing to a stream.
        seed: of the order; the same on all ranks.
        num_workers: processes that fetch for this rank; "auto" takes the cores that the
            ranks leave over, four at most, and none for tensors in memory. A stream has
            one at most, for each would have to read all of it.
        pin_memory: fetch into memory that a GPU can read; "auto" where there is one.
        prefetch: batches that each worker fetches ahead, 1 or more.
        drop_last: leave out a last global batch that is not full.
        collate_fn: makes a batch of a list of samples; default torch's.
        device: where batches go; default this rank's GPU, where it has one, else the
            CPU. The copy to a GPU runs beside the step before.
        join: for torch's `Join`: a rank with nothing left ends its epoch, instead of
            getting an empty batch.
        group: ranks to divide among; default those of the world.

    Raises:
        UsageError: an argument is out of range, or two contradict each other.
    """
    size = place_in(group)[1]
    total = _global_size(batch_size, global_batch_size, size)
    stream = is_stream(dataset)
    target = _own_device() if device is None else torch.device(device)
    how = Fetching(
        collate=collate_fn or (first_item if total is None else default_collate),
        workers=_workers(num_workers, dataset, stream, size),
        ahead=whole_number("prefetch", prefetch, 1),
        pin=_pin(pin_memory, target),
    )
    sampler: Sampler | StreamPosition = StreamPosition()
    if not stream:
        sampler = Sampler(
            dataset,
            total or size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            group=group,
        )
    return Loader(
        dataset,
        how,
        sampler,
        total,
        partial(place_in, group),
        drop_last=drop_last,
        device=target,
        join=join,
    )


def _global_size(each: int | None, together: int | None, size: int) -> int | None:
    if each is not None and together is not None:
        raise UsageError(
            f"batch_size={each} and global_batch_size={together}: give one of them; "
            f"the first is each rank's, the second that of all {size} together"
        )
    if each is not None:
        return whole_number("batch_size", each, 1) * size
    return None if together is None else whole_number("global_batch_size", together, 1)


def _workers(wanted: int | str, dataset: Any, stream: bool, size: int) -> int:
    """Worker processes of this rank."""
    most = 1 if stream else MOST_WORKERS
    if wanted == "auto":
        if isinstance(dataset, TensorDataset):  # no worker could send them as fast
            return 0
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or size)
        return max(0, min(most, cores() // ranks_here - 1))
    number = whole_number("num_workers", wanted, 0, ' or "auto"')
    return min(number, most) if stream else number


def _pin(wanted: bool | str, device: torch.device) -> bool:
    if wanted == "auto":
        return device.type == "cuda"
    if isinstance(wanted, bool):
        return wanted and torch.cuda.is_available()
    raise UsageError(f'pin_memory={wanted!r}: expected True, False or "auto"')


def _own_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
