"""The ring schedule as data: who sends which chunk to whom, step by step.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69 (2009). This module only computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

__all__ = ["RingStep", "chunk_bounds", "ring_steps"]


@dataclass(frozen=True)
class RingStep:
    """The sends and receives of one rank in one step of a ring all-reduce."""

    step: int
    """0 to 2(N-1)-1."""
    rank: int
    phase: str
    """"reduce-scatter" (received chunks are added) or "all-gather" (they replace)."""
    send_to: int
    send_chunk: int
    receive_from: int
    receive_chunk: int


def chunk_bounds(length: int, chunks: int) -> list[tuple[int, int]]:
    """Divide `length` elements into `chunks` runs whose lengths differ by at most one.

    Args:
        length: number of elements; may be smaller than `chunks`, or 0.
        chunks: number of runs, at least 1.

    Returns:
        One half-open `(start, stop)` per chunk, in order, without gaps. The first
        `length % chunks` runs hold the extra element.
    """
    size, extra = divmod(length, chunks)
    starts = [i * size + min(i, extra) for i in range(chunks + 1)]
    return list(pairwise(starts))


def ring_steps(world_size: int, rank: int | None = None) -> list[RingStep]:
    """The chunk schedule of a ring all-reduce.

    In step s of the first N-1, rank r sends chunk (r - s) mod N to its right neighbour
    and adds the chunk (r - s - 1) mod N that comes from its left. Then rank r holds the
    whole sum of chunk (r + 1) mod N, and N-1 more steps pass the sums around.

    Args:
        world_size: number of ranks N, at least 1.
        rank: only this rank's steps; None gives every rank's, ordered by step.

    Returns:
        2(N-1) steps per rank; none for a world of one.
    """
    ranks = range(world_size) if rank is None else [rank]
    return [
        _step(step, each, world_size)
        for step in range(2 * (world_size - 1))
        for each in ranks
    ]


def _step(step: int, rank: int, size: int) -> RingStep:
    gathering = step >= size - 1
    # The all-gather starts from the chunk this rank completed: (rank + 1) mod N.
    first = rank + 1 - (step - size + 1) if gathering else rank - step
    return RingStep(
        step=step,
        rank=rank,
        phase="all-gather" if gathering else "reduce-scatter",
        send_to=(rank + 1) % size,
        send_chunk=first % size,
        receive_from=(rank - 1) % size,
        receive_chunk=(first - 1) % size,
    )
