"""The schedule of a ring all-reduce: which rank sends which chunk in each step.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69 (2009). This module sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

__all__ = ["RingStep", "chunk_bounds", "ring_steps"]


@dataclass(frozen=True)
class RingStep:
    """The sends and receives of one rank in one step of a ring all-reduce."""

    step: int
    """The number of the step, 0 to 2(N-1)-1."""
    rank: int
    phase: str
    """"reduce-scatter": a received chunk is added to the rank's. "all-gather": it
    replaces the rank's."""
    send_to: int
    send_chunk: int
    receive_from: int
    receive_chunk: int


def chunk_bounds(length: int, chunks: int) -> list[tuple[int, int]]:
    """Divide `length` elements into chunks whose lengths differ by at most one.

    Args:
        length: number of elements, 0 or more; may be smaller than `chunks`.
        chunks: number of chunks, at least 1.

    Returns:
        The half-open range `(start, stop)` of each chunk, in order, without gaps. The
        first `length % chunks` chunks have one element more.
    """
    size, extra = divmod(length, chunks)
    starts = [i * size + min(i, extra) for i in range(chunks + 1)]
    return list(pairwise(starts))


def ring_steps(world_size: int, rank: int | None = None) -> list[RingStep]:
    """The schedule of a ring all-reduce (Patarasuk and Yuan, 2009).

    In each step s of the first N-1, rank r sends chunk (r - s) mod N to rank r + 1. It
    receives chunk (r - s - 1) mod N from rank r - 1 and adds it. Rank r then has the
    sum of chunk (r + 1) mod N. In N-1 more steps the sums are passed around the ring.
    The function communicates with no rank and needs none.

    Args:
        world_size: number of ranks N, at least 1.
        rank: the rank whose steps are returned; None for all ranks, ordered by step.

    Returns:
        2(N-1) steps per rank; [] for one rank.
    """
    ranks = range(world_size) if rank is None else [rank]
    return [
        _step(step, each, world_size)
        for step in range(2 * (world_size - 1))
        for each in ranks
    ]


def _step(step: int, rank: int, size: int) -> RingStep:
    gathering = step >= size - 1
    # The all-gather starts from the chunk that this rank has summed: (rank + 1) mod N.
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
