"""Data sets whose samples have an index, divided among ranks by a sampler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import TensorDataset, default_collate

from nbdist.training.data.fetch import Fetching, Part
from nbdist.training.data.sampler import Sampler, share_of

__all__ = ["by_index"]


class _Lists:
    """A sampler's lists of indices.

    An empty list is replaced by the index of one sample, which shows the batch's
    structure.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return (indices or [0] for indices in self._sampler)


def by_index(dataset: Any, sampler: Sampler, fetching: Fetching) -> Iterator[Part]:
    """Yield this rank's parts of the global batches that are left in the epoch."""
    rank, size = sampler.rank_and_size
    totals = [stop - start for start, stop in sampler.bounds()]
    lists = _Lists(sampler)
    if isinstance(dataset, TensorDataset) and fetching.collate is default_collate:
        batches = _rows(dataset, lists, fetching.pin)
    else:
        batches = fetching.batches(
            dataset, batch_sampler=lists, collate_fn=fetching.collate
        )
    for batch, total in zip(batches, totals, strict=True):
        share = share_of(total, rank, size)
        yield Part(batch, share.stop - share.start, total)


def _rows(
    dataset: TensorDataset, lists: Iterable[list[int]], pin: bool
) -> Iterator[Any]:
    """Yield batches of a TensorDataset. One index operation fetches a whole batch."""
    for indices in lists:
        rows = [tensor[indices] for tensor in dataset.tensors]
        yield [row.pin_memory() if pin and not row.is_cuda else row for row in rows]
