"""The loader: this rank's batches, fetched ahead and copied to its device."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from nbdist.collectives import Group
from nbdist.errors import UsageError
from nbdist.ipc.resources import cores
from nbdist.telemetry import internal_metrics
from nbdist.training import lasting
from nbdist.training.data.device_prefetch import map_children, on_device
from nbdist.training.data.fetch import Collate, Fetching, Part, first_item
from nbdist.training.data.indexed import by_index
from nbdist.training.data.sampler import Sampler, rank_and_size
from nbdist.training.data.stream import Division, StreamPosition, from_stream, is_stream
from nbdist.training.data.wait_stats import Waits
from nbdist.training.device import own_device
from nbdist.training.validation import whole_number

__all__ = ["Loader", "loader"]

MOST_WORKERS = 4


class Loader:
    """Iterates over this rank's batches of an epoch.

    `nbdist.loader` and a strategy's `distribute` return loaders. Every rank must make
    one and loop over it. All ranks take the same number of steps. A loop continues at
    the position at which the previous loop was left. After a complete epoch, the next
    loop begins the next epoch.
    """

    def __init__(
        self,
        dataset: Any,
        fetching: Fetching,
        sampler: Sampler | StreamPosition,
        batch_size: int | None,
        rank_and_size: Callable[[], tuple[int, int]],
        *,
        drop_last: bool = False,
        device: torch.device | None = None,
        join: bool = False,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        """Holds the epoch and the position in it."""
        self.device = device
        """The device to which batches are copied; None for no copy."""
        self.num_workers = fetching.workers
        self.global_batch_size = batch_size
        """Samples of all ranks in a step; None if the data set's items are batches."""
        self.waits = Waits()
        """The time that steps waited for data; `print(loader.waits)` shows it."""
        self._fetching, self._drop_last, self._join = fetching, drop_last, join
        self._rank_and_size = rank_and_size
        self.in_hand = 0
        """Samples of all ranks together in the last batch."""
        self._local = 0
        self._size = 1
        self._loop: weakref.ref[Generator[Any, None, None]] | None = None
        lasting.register(self)

    def __getstate__(self) -> dict[str, Any]:
        # The loop is not copied, for instance to a rank that joins.
        return {**self.__dict__, "_loop": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        lasting.register(self)

    def _begin_again(self) -> None:
        pass  # what is half done, `_agree` completes

    def _progress(self) -> tuple[Hashable, Any]:
        sampler, size = self.sampler, self._rank_and_size()[1]
        key: list[Hashable] = [self.global_batch_size, self._drop_last, size]
        progress: Any = sampler.epoch, sampler.position
        if isinstance(sampler, Sampler):
            key += sampler.length, sampler.seed, sampler.shuffle
            if sampler.position and not sampler.next_size:  # the end of a loop was cut
                progress = sampler.epoch + 1, 0
        return tuple(key), progress if size > 1 else None

    def _agree(self, everyones: Sequence[Any]) -> None:
        """Go back to the rank that has taken the fewest steps.

        Ranks at different positions would take different numbers of steps.
        """
        known = [each for each in everyones if each is not None]
        before = self.sampler.epoch, self.sampler.position
        if not known or min(known) == before:
            return
        self._end_loop()
        self.sampler.epoch, self.sampler.position = min(known)
        if self.sampler.epoch != before[0]:
            self._set_dataset_epoch()

    def _end_loop(self) -> None:
        # An error's traceback may keep the previous loop and its workers alive.
        left = None if self._loop is None else self._loop()
        if left is not None:
            left.close()

    def __iter__(self) -> Iterator[Any]:
        self._end_loop()
        loop = self._rest_of_epoch()
        self._loop = weakref.ref(loop)
        return loop

    def _rest_of_epoch(self) -> Generator[Any, None, None]:
        self._size = self._rank_and_size()[1]
        parts = self._parts()
        if self.device is not None:
            parts = on_device(parts, self.device)
        steps = self._known_length()
        try:
            self.waits.begin()
            while (part := next(parts, None)) is not None:
                self._count(part)
                if self._join and part.local == 0:
                    continue
                self.waits.arrive()
                yield part.batch if part.local else _emptied(part.batch)
                if steps is not None:
                    internal_metrics.count_batches(self._steps_done, steps)
                self.waits.begin()
        finally:
            self.waits.leave()
        self.set_epoch(self.sampler.epoch + 1)

    def __len__(self) -> int:
        """The number of steps in a whole epoch.

        Raises:
            TypeError: the data set is a stream without a length.
        """
        full, rest = divmod(len(self.dataset), self._step_size)
        return full + (rest > 0 and not self._drop_last)

    @property
    def _step_size(self) -> int:
        """Samples of all ranks in a step, or items if these are batches."""
        return self.global_batch_size or self._rank_and_size()[1]

    @property
    def _steps_done(self) -> int:
        """The number of steps in this epoch so far."""
        return -(-self.sampler.position // self._step_size)

    def _known_length(self) -> int | None:
        """The number of steps in a whole epoch; None if it is unknown."""
        try:
            return len(self)
        except TypeError:
            return None

    def _parts(self) -> Iterator[Part]:
        rank, size = self._rank_and_size()
        batch_size = self.global_batch_size or size
        if isinstance(self.sampler, Sampler):
            self.sampler.batch_size = batch_size
            return by_index(self.dataset, self.sampler, self._fetching)
        whose = Division(rank, size, batch_size, self.sampler.position, self._drop_last)
        return from_stream(self.dataset, whose, self._fetching)

    def _count(self, part: Part) -> None:
        """Advance by a part's global batch, as every rank does."""
        self._local, self.in_hand = part.local, part.total
        self.sampler.position += part.total

    # -- the last batch --------------------------------------------------------------

    @property
    def weight(self) -> float:
        """The factor for this rank's mean loss over the last batch.

        With this factor, the average of the ranks' gradients is the gradient of the
        mean over the global batch, also if the ranks' parts differ in size. The factor
        is 1.0 for parts of equal size, and 0.0 for an empty part. The mean over an
        empty part is NaN: use `average` where a part may be empty.
        """
        return self._local * self._size / self.in_hand if self.in_hand else 1.0

    def average(self, losses: Tensor) -> Tensor:
        """Return this rank's part of the mean loss over the last global batch.

        The average of its gradients over the ranks, as DDP computes it, is the gradient
        of the mean over the global batch, for parts of any size. Any rank may call it
        alone.

        Args:
            losses: the loss of each sample of this rank's batch, shape (batch, ...), as
                a loss with `reduction="none"` returns. Further dimensions are averaged.

        Returns:
            A scalar on the device of `losses`; 0 if this rank's part is empty.
        """
        if len(losses) == 0:
            return losses.sum()
        return losses.mean() * self.weight

    # -- the position ----------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. In the current epoch, this has no effect.

        If the data set has a method `set_epoch`, it is called too.
        """
        self.sampler.set_epoch(epoch)
        self._set_dataset_epoch()

    def state_dict(self) -> dict[str, int]:
        """The position after the last batch. It is equal on all ranks."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position at which the next loop begins, in a world of any size."""
        self.sampler.load_state_dict(state)
        self._set_dataset_epoch()

    def _set_dataset_epoch(self) -> None:
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
    """Make a loader that divides a data set's batches among the ranks.

    In each epoch, each sample goes to one rank. Every rank must make the loader, with
    equal arguments, and loop over it.

    Args:
        dataset: a map-style data set or a stream. A map-style data set has
            `__getitem__` and `__len__`, and its order follows from `shuffle` and
            `seed` (see `nbdist.Sampler`). A stream is any other iterable. Every rank
            reads the whole stream, and rank r keeps the items i with i % size == r.
        batch_size: samples of one rank in each step. The size of the global batch is
            `batch_size` times the current number of ranks. It stays the same when the
            world changes its size.
        global_batch_size: samples of all ranks together in each step, instead of
            `batch_size`. If neither is given, each item of the data set is a batch, and
            each rank gets one in each step.
        shuffle: use a new order in each epoch; ignored for a stream.
        seed: seed of the order; the same on all ranks.
        num_workers: processes that fetch for this rank. "auto" is this rank's share of
            the host's cores less one, at most four, and 0 for a TensorDataset. A stream
            has at most one, because each worker would read the whole stream.
        pin_memory: fetch into pinned memory; "auto" if the device is a GPU.
        prefetch: number of batches that each worker fetches ahead, 1 or more.
        drop_last: drop the last global batch if it is not full.
        collate_fn: makes a batch of a list of samples. Default: torch's
            `default_collate`.
        device: the device to which batches are copied. Default: this rank's GPU if it
            has one, else the CPU. The copy to a GPU overlaps with the previous step.
        join: for `torch.distributed.algorithms.Join`: a rank without samples in the
            last batch ends its epoch. By default it gets an empty batch.
        group: the ranks that share the samples. Default: all ranks of the world.

    Raises:
        UsageError: an argument is out of range, or two contradict each other.
    """
    size = rank_and_size(group)[1]
    total = _global_size(batch_size, global_batch_size, size)
    stream = is_stream(dataset)
    target = own_device() if device is None else torch.device(device)
    fetching = Fetching(
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
        fetching,
        sampler,
        total,
        partial(rank_and_size, group),
        drop_last=drop_last,
        device=target,
        join=join,
    )


def _global_size(each: int | None, together: int | None, size: int) -> int | None:
    if each is not None and together is not None:
        raise UsageError(
            f"batch_size={each} and global_batch_size={together}: pass one of them; "
            f"batch_size counts one rank's samples, global_batch_size those of all "
            f"{size} ranks"
        )
    if each is not None:
        return whole_number("batch_size", each, 1) * size
    return None if together is None else whole_number("global_batch_size", together, 1)


def _workers(wanted: int | str, dataset: Any, stream: bool, size: int) -> int:
    """The number of worker processes of this rank."""
    most = 1 if stream else MOST_WORKERS
    if wanted == "auto":
        if isinstance(dataset, TensorDataset):  # sending rows would take longer
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


def _emptied(batch: Any) -> Any:
    """The batch without its samples: tensors, arrays and lists of length 0.

    A value without a length, such as a number, is unchanged.
    """
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch[:0] if batch.ndim else batch
    if isinstance(batch, (list, tuple)) and not any(map(_is_container, batch)):
        return batch[:0]
    return map_children(_emptied, batch)


def _is_container(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray, Mapping, list, tuple))
