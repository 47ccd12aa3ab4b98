"""What a cell leaves behind, rank by rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from nbdist.wire import Failure, format_ranks

__all__ = ["CellResult", "RankResult"]


@dataclass
class RankResult:
    """One rank's part of a cell."""

    rank: int
    stdout: str = ""
    stderr: str = ""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    """MIME bundles that were displayed, the last expression's among them."""
    failure: Failure | None = None
    seconds: float = 0.0
    """How long the cell ran on this rank."""

    @property
    def ok(self) -> bool:
        return self.failure is None


@dataclass
class CellResult(Collection[RankResult]):
    """What a cell did on each rank that ran it, in rank order.

    `result[2]` is rank 2's part, `2 in result` says whether rank 2 ran the cell, and
    iterating gives the parts.
    """

    ranks: dict[int, RankResult]
    """The same by rank, in rank order."""
    world_size: int

    @property
    def ok(self) -> bool:
        """Whether no rank failed."""
        return not self.failures

    @property
    def failures(self) -> list[Failure]:
        return [r.failure for r in self.ranks.values() if r.failure is not None]

    def __getitem__(self, rank: int) -> RankResult:
        try:
            return self.ranks[rank]
        except KeyError:
            asked = format_ranks(self.ranks)
            raise KeyError(f"rank {rank!r}: the cell ran on rank {asked}") from None

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[RankResult]:
        return iter(self.ranks.values())

    def __contains__(self, item: object) -> bool:
        """Whether a rank, by its number, ran the cell; or whether a part is its."""
        if isinstance(item, RankResult):
            return item in self.ranks.values()
        return isinstance(item, int) and item in self.ranks
