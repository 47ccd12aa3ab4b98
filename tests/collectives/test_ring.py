"""The ring's schedule, simulated with sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.collectives import chunk_bounds, ring_steps

SIZES = st.integers(1, 17)


@given(length=st.integers(0, 5000), chunks=SIZES)
def test_chunks_cover_everything_once_and_evenly(length: int, chunks: int) -> None:
    bounds = chunk_bounds(length, chunks)
    covered = [index for start, stop in bounds for index in range(start, stop)]
    assert covered == list(range(length))
    sizes = [stop - start for start, stop in bounds]
    assert len(sizes) == chunks
    assert max(sizes) - min(sizes) <= 1


@given(size=SIZES)
def test_every_rank_ends_with_every_contribution_once(size: int) -> None:
    """holds[rank][chunk] lists the ranks whose contributions are in the chunk."""
    holds = [[[rank] for _ in range(size)] for rank in range(size)]
    for step in range(2 * (size - 1)):
        moves = [move for move in ring_steps(size) if move.step == step]
        sent = {move.rank: holds[move.rank][move.send_chunk] for move in moves}
        for move in moves:
            received = sent[move.receive_from]
            kept = holds[move.rank][move.receive_chunk]
            gathering = move.phase == "all-gather"
            holds[move.rank][move.receive_chunk] = (
                list(received) if gathering else kept + received
            )
    for chunks in holds:
        assert all(sorted(chunk) == list(range(size)) for chunk in chunks)


@given(size=st.integers(2, 17))
def test_each_rank_sends_the_chunk_that_the_next_rank_receives(size: int) -> None:
    steps = {(move.step, move.rank): move for move in ring_steps(size)}
    assert len(steps) == 2 * (size - 1) * size
    for move in steps.values():
        neighbour = steps[move.step, move.send_to]
        assert neighbour.receive_from == move.rank
        assert neighbour.receive_chunk == move.send_chunk


def test_a_single_rank_sends_nothing() -> None:
    assert ring_steps(1) == []


@pytest.mark.parametrize("rank", range(3))
def test_the_steps_of_one_rank(rank: int) -> None:
    assert ring_steps(3, rank) == [s for s in ring_steps(3) if s.rank == rank]
