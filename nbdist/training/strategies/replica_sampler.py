"""A sampler over the replicas of a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbdist.errors import UsageError
from nbdist.training.data.sampler import Sampler

__all__ = ["ReplicaSampler"]


class ReplicaSampler(Sampler):
    """A sampler that divides global batches among the replicas of a strategy.

    Args:
        data, batch_size, options: as for `nbdist.Sampler`.
        rank_and_size: returns the current (replica, number of replicas).

    Raises:
        UsageError: the data set has no length.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        rank_and_size: Callable[[], tuple[int, int]],
        **options: Any,
    ) -> None:
        if not hasattr(data, "__len__"):
            raise UsageError(
                f"distribute({type(data).__name__}): expected a data set with a length"
            )
        super().__init__(data, batch_size, **options)
        self._rank_and_size = rank_and_size

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """The current (replica, number of replicas)."""
        return self._rank_and_size()
