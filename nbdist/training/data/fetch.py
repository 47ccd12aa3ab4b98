"""Fetches a rank's batches with a DataLoader, and ends its workers promptly.

A worker that is not forked imports this module, so it imports no MPI: the worker would
be a process of its own to MPI.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, _utils

from nbdist.ipc.prctl import die_with_parent

__all__ = ["Collate", "Fetching", "Part", "first_item"]

Collate = Callable[[list[Any]], Any]
JOIN_TIMEOUT_S = 1.0
PATIENCE_S = 0.3
"""Seconds that each worker has to finish its sample when a loop is left."""


class Part(NamedTuple):
    """This rank's part of a global batch."""

    batch: Any
    """The collated samples. If `local` is 0, it holds one sample, which shows the
    batch's structure."""
    local: int
    """Number of this rank's samples in the batch."""
    total: int
    """Number of samples of all ranks in the global batch."""


@dataclass(frozen=True)
class Fetching:
    """Options of a DataLoader."""

    collate: Collate
    workers: int
    """Number of worker processes of this rank."""
    ahead: int = 2
    """Number of batches that each worker fetches ahead."""
    pin: bool = False
    """Whether batches are fetched into pinned memory."""

    def batches(self, dataset: Any, **arguments: Any) -> Iterator[Any]:
        """Yield a DataLoader's batches. Its workers end when the consumer leaves.

        torch itself waits up to five seconds for each worker to finish its sample.
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
    """Shut the workers down as torch does, with a shorter wait for their samples.

    The workers get no signal before, because it could end a worker that holds the lock
    that torch's shutdown needs.
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


def first_item(items: list[Any]) -> Any:
    """Collate a list of one item that is already a batch."""
    return items[0]


def _die_with_rank(_worker: int) -> None:
    """Have this worker process end when its rank ends in any way."""
    die_with_parent()
    rank = multiprocessing.parent_process()
    if rank is not None and rank.pid != os.getppid():  # a fork server is in between
        threading.Thread(target=_end_after, args=(rank,), daemon=True).start()


def _end_after(rank: Any) -> None:
    rank.join()
    os.kill(os.getpid(), signal.SIGKILL)
