"""Streams: data that can only be read from the beginning, divided among ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from nbdist.training.data.fetch import Collate, Fetching, Part

__all__ = ["StreamPosition", "from_stream", "is_stream"]


def is_stream(dataset: Any) -> bool:
    """Whether a data set can only be iterated over, not indexed."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


@dataclass
class StreamPosition:
    """The position of all ranks in a stream, with the interface of `nbdist.Sampler`."""

    epoch: int = 0
    position: int = 0
    """Items of this epoch that the training has used, of all ranks together."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. In the current epoch, this has no effect."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


@dataclass(frozen=True)
class Division:
    """Divides the items of a stream among ranks: item i goes to rank i % size.

    A global batch has consecutive items. Every rank reads the whole stream, so it knows
    the size of each global batch, also of the last.
    """

    rank: int
    size: int
    batch_size: int
    """Number of items in a global batch."""
    begin: int
    """Index of the first item to yield. Items before it are read and dropped."""
    drop_last: bool


def from_stream(
    items: Iterable[Any], division: Division, fetching: Fetching
) -> Iterator[Part]:
    """Yield this rank's parts of the global batches that are left in a stream."""
    stream = _Stream(items, division, fetching.collate)
    return fetching.batches(stream, batch_size=None, collate_fn=_identity)


class _Stream(IterableDataset[Part]):
    """Makes parts in the process that reads the stream: a worker, or the rank."""

    def __init__(
        self, items: Iterable[Any], division: Division, collate: Collate
    ) -> None:
        self._items, self._division, self._collate = items, division, collate

    def __iter__(self) -> Iterator[Part]:
        items = itertools.islice(enumerate(self._items), self._division.begin, None)
        while part := self._next(items):
            yield part

    def _next(self, items: Iterator[tuple[int, Any]]) -> Part | None:
        division = self._division
        mine: list[Any] = []
        example: list[Any] = []
        total = 0
        for number, item in itertools.islice(items, division.batch_size):
            total += 1
            example = example or [item]
            if number % division.size == division.rank:
                mine.append(item)
        if total == 0 or (division.drop_last and total < division.batch_size):
            return None
        return Part(self._collate(mine or example), len(mine), total)


def _identity(part: Part) -> Part:
    return part
