"""What a cell leaves behind, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbdist.wire import Failure

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
class CellResult:
    """A cell on its ranks, in rank order; `result[2]` is rank 2's part."""

    ranks: dict[int, RankResult]
    world_size: int

    @property
    def ok(self) -> bool:
        """Whether no rank failed."""
        return not self.failures

    @property
    def failures(self) -> list[Failure]:
        return [r.failure for r in self.ranks.values() if r.failure is not None]

    def __getitem__(self, rank: int) -> RankResult:
        return self.ranks[rank]

    def __len__(self) -> int:
        return len(self.ranks)
