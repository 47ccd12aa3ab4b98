"""The ring all-reduce notebook."""

from __future__ import annotations

from collections.abc import Callable


def test_it_counts_the_messages_of_a_ring(run_example: Callable[[str], str]) -> None:
    printed = run_example("ring_allreduce")
    # Seven elements over four ranks: chunks of 2, 2, 2 and 1, six of them sent.
    assert "[0,3] 6 messages, 10 elements sent" in printed
    assert "[1-2] 6 messages, 11 elements sent" in printed
    assert "step 5 all-gather" in printed
    for algorithm in ("ring", "mpi", "auto"):
        assert f"{algorithm} " in printed
    assert "the ranks called different collectives" in printed
