"""Follows the loops over torch's DataLoaders, whose progress the monitor shows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from nbdist.telemetry.loops import Loops

__all__ = ["follow"]

_DONE = attrgetter("_num_yielded")
"""The batches that an iterator of a DataLoader has given."""


def follow(loops: Loops) -> None:
    """Have each iterator that a DataLoader makes followed, without other effects."""
    make: Callable[[DataLoader[Any]], Any] = DataLoader.__iter__

    @functools.wraps(make)
    def begin(self: DataLoader[Any]) -> Any:
        iterator = make(self)
        # torch warns of a dataset whose length was asked and is wrong.
        if not isinstance(self.dataset, IterableDataset):
            # A user's sampler may have no length, and raise anything.
            with contextlib.suppress(Exception):
                loops.begin(iterator, _DONE, len(self))
        return iterator

    DataLoader.__iter__ = begin  # type: ignore[method-assign]
