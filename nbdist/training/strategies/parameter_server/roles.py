"""Who serves, who works, and which server has which parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.errors import UsageError

__all__ = ["Roles", "shards_by_bytes"]


@dataclass(frozen=True)
class Roles:
    """Of the ranks 0 to size-1 the last `n_ps` serve, and the others work."""

    size: int
    n_ps: int

    def __post_init__(self) -> None:
        if not 1 <= self.n_ps < self.size:
            raise UsageError(
                f"n_ps={self.n_ps} of {self.size} ranks: expected 1 server or more, "
                "and a worker at least; %dist_scale adds ranks"
            )

    @property
    def workers(self) -> range:
        """Their ranks."""
        return range(self.size - self.n_ps)

    @property
    def servers(self) -> range:
        """Their ranks, in the order of the shards."""
        return range(self.size - self.n_ps, self.size)


def shards_by_bytes(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Deal tensors out into shards of about equally many bytes.

    The largest first, each to the shard that is the smallest so far: no shard is longer
    than 4/3 of the best possible (Graham, "Bounds on Multiprocessing Timing Anomalies",
    SIAM Journal on Applied Mathematics, 1969).

    Args:
        sizes: of the tensors, in bytes.
        count: shards.

    Returns:
        The tensors of each shard, by their places in `sizes`, in ascending order.
    """
    if count > len(sizes):
        raise UsageError(
            f"n_ps={count}: the optimizer has {len(sizes)} parameters, and a server "
            "holds whole ones: take fewer servers"
        )
    shards: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        least = filled.index(min(filled))
        shards[least].append(place)
        filled[least] += sizes[place]
    return [sorted(shard) for shard in shards]
