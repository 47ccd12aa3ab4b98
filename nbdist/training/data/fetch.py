"""How a rank's batches are fetched: by a DataLoader whose workers end in time."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, TensorDataset, _utils, default_collate

from nbdist.training.data.sampler import Sampler, share_of

__all__ = ["Collate", "Fetching", "Part", "by_index", "first_item"]

Collate = Callable[[list[Any]], Any]
PR_SET_PDEATHSIG = 1
JOIN_TIMEOUT_S = 1.0
PATIENCE_S = 0.3
"""How long each worker of a loop that was left may take to finish a sample."""


class Part(NamedTuple):
    """This rank's part of a global batch."""

    batch: Any
    """Collated. Where `local` is 0 it holds a sample all the same, for its form."""
    local: int
    """Samples of this rank in it."""
    total: int
    """Samples of all ranks."""


@dataclass(frozen=True)
class Fetching:
    """How a DataLoader is to fetch."""

    collate: Collate
    workers: int
    ahead: int = 2
    """Batches that each worker fetches ahead."""
    pin: bool = False

    def batches(self, dataset: Any, **arguments: Any) -> Iterator[Any]:
        """A DataLoader's batches. Its workers end when the consumer leaves.

        By itself torch waits up to five seconds for each to finish what it is doing.
        """
        batches = iter(
            DataLoader(
                dataset,
                num_workers=self.workers,
                prefetch_factor=self.ahead if self.workers else None,
                pin_memory=self.pin,
                worker_init_fn=_die_with_rank,
                **arguments,
            )
        )
        try:
            yield from batches
        finally:
            _end_workers(batches)


def _end_workers(batches: Any) -> None:
    """Torch's own orderly end, with less patience for what a worker is still doing.

    Not by a signal before it: that could end a worker while it holds the lock that
    torch's shutdown needs.
    """
    end = getattr(batches, "_shutdown_workers", None)
    if end is None:  # without workers
        return
    patience = _utils.MP_STATUS_CHECK_INTERVAL
    _utils.MP_STATUS_CHECK_INTERVAL = PATIENCE_S
    try:
        end()
    finally:
        _utils.MP_STATUS_CHECK_INTERVAL = patience
    for worker in batches._workers:
        worker.join(JOIN_TIMEOUT_S)


class _Lists:
    """A sampler's lists of indices; an empty one gets a sample, for its form."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return (indices or [0] for indices in self._sampler)


def by_index(dataset: Any, sampler: Sampler, how: Fetching) -> Iterator[Part]:
    """The rest of the sampler's epoch, in parts of this rank."""
    rank, size = sampler.place
    totals = [stop - start for start, stop in sampler.bounds()]
    lists = _Lists(sampler)
    if isinstance(dataset, TensorDataset) and how.collate is default_collate:
        batches = _rows(dataset, lists, how.pin)
    else:
        batches = how.batches(dataset, batch_sampler=lists, collate_fn=how.collate)
    for batch, total in zip(batches, totals, strict=True):
        share = share_of(total, rank, size)
        yield Part(batch, share.stop - share.start, total)


def _rows(
    dataset: TensorDataset, lists: Iterable[list[int]], pin: bool
) -> Iterator[Any]:
    """What a DataLoader would give, many times as fast: each batch in one step."""
    for indices in lists:
        rows = [tensor[indices] for tensor in dataset.tensors]
        yield [row.pin_memory() if pin and not row.is_cuda else row for row in rows]


def first_item(items: list[Any]) -> Any:
    """Collates items that are batches already, of which a rank takes one at a time."""
    return items[0]


def _die_with_rank(_worker: int) -> None:
    """Have Linux end this worker process when its rank ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
