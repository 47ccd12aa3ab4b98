"""Each replica's share of every global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, default_collate

from nbdist.errors import UsageError
from nbdist.training.sampler import Sampler

__all__ = ["Batches", "Divide"]

Collate = Callable[[list[Any]], Any]


class Divide(Sampler):
    """A sampler that divides global batches among the replicas of a strategy.

    Args:
        data, batch_size, options: as of `nbdist.Sampler`.
        place: (replica, number of replicas), as they are when it is called.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        place: Callable[[], tuple[int, int]],
        **options: Any,
    ) -> None:
        if not hasattr(data, "__len__"):
            raise UsageError(
                f"distribute({type(data).__name__}): expected a data set with a length"
            )
        super().__init__(data, batch_size, **options)
        self._place = place

    @property
    def place(self) -> tuple[int, int]:
        """(replica, number of replicas)."""
        return self._place()


class Batches:
    """A loader: iterating yields this replica's share of each global batch.

    Each time it is iterated is an epoch, in an order of its own if shuffled.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: Divide,
        *,
        collate_fn: Collate | None,
        num_workers: int,
    ) -> None:
        self.sampler = sampler
        """Knows epoch and position; its `state_dict` is where the training is."""
        self.in_hand = 0
        """Samples of all replicas together in the batch that was handed out last."""
        self._loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=_OrNothing(dataset, collate_fn or default_collate),
            num_workers=num_workers,
        )

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self.in_hand = self.sampler.next_size
            self.sampler.advance()
            yield batch
        self.sampler.end_epoch()

    def __len__(self) -> int:
        """Global batches in an epoch."""
        return len(self.sampler)


class _OrNothing:
    """Collates samples; of none, a batch shaped like others, with no samples in it."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return self._collate(samples)
        one = self._collate([self._dataset[0]])
        return tree_map(lambda x: x[:0] if isinstance(x, (Tensor, list)) else x, one)
