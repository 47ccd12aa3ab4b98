"""Every wait can be released, with an error that has the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pretended_hosts import HOSTS_OF_TWO
from ranks import RanksFailed, launch

FAULTS = str(Path(__file__).with_name("faults.py"))
SIZE = 4
SHARED = ["shared", "shared, in Python"]
HOSTS = f"auto, {HOSTS_OF_TWO}"
CALLS: list[tuple[str, tuple[object, ...]]] = [
    ("abort", ("shared",)),
    ("abort", ("shared, in Python",)),
    ("abort", ("mpi",)),
    ("abort", (HOSTS,)),
    ("abort_within_hosts", ()),
    ("interrupt", ("shared",)),
    ("interrupt", ("shared, in Python",)),
    ("interrupt", ("mpi",)),
    ("interrupt", (HOSTS,)),
    ("leave", ("shared",)),
    ("leave", ("shared, in Python",)),
    ("time_out", ("shared",)),
    ("time_out", ("shared, in Python",)),
    ("time_out", ("mpi",)),
    ("one_message_is_missing", ()),
    ("a_message_of_another_shape", ()),
    ("tell_where", ()),
    ("count_messages", ("ring",)),
    ("count_messages", ("mpi",)),
    ("no_group_here", ()),
    *[
        ("fail_on_a_gpu", (how, rank))
        for how in ("mpi", "shared")
        for rank in (0, 2, 3)
    ],
    *[
        (name, (how,))
        for name in ("close_together", "close_alone")
        for how in ("mpi", "shared")
    ],
]


Outcome = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """A function's results in rank order. All functions run in one launch."""
    everything = launch(SIZE, FAULTS, "run_functions", CALLS, deadline_s=100)

    def ask(name: str, *arguments: object) -> list[Any]:
        index = CALLS.index((name, arguments))
        values = [results[index] for results in everything]
        errors = [str(value) for value in values if isinstance(value, Exception)]
        assert not errors, "\n".join(errors)
        return values

    return ask


@pytest.mark.parametrize("transport", [*SHARED, "mpi", HOSTS])
def test_abort_releases_every_kind_of_wait(outcome: Outcome, transport: str) -> None:
    outcome("abort", transport)


def test_abort_releases_every_rank_of_a_hierarchical_reduction(
    outcome: Outcome,
) -> None:
    outcome("abort_within_hosts")


@pytest.mark.parametrize("transport", [*SHARED, "mpi", HOSTS])
def test_interrupt_ends_every_kind_of_wait(outcome: Outcome, transport: str) -> None:
    outcome("interrupt", transport)


@pytest.mark.parametrize("transport", SHARED)
def test_a_rank_that_leaves_releases_the_others(
    outcome: Outcome, transport: str
) -> None:
    for message in outcome("leave", transport)[1:3]:
        assert "rank 0 of the group left it: CollectiveTimeout: barrier #1" in message


@pytest.mark.parametrize("transport", ["mpi", "shared"])
@pytest.mark.parametrize("failing", [0, 2, SIZE - 1])
def test_a_rank_that_cannot_connect_its_gpu_ends_the_connection_of_all(
    outcome: Outcome, transport: str, failing: int
) -> None:
    outcome("fail_on_a_gpu", transport, failing)


@pytest.mark.parametrize("transport", ["mpi", "shared"])
def test_a_group_is_closed_when_all_ranks_have_finished(
    outcome: Outcome, transport: str
) -> None:
    logs = outcome("close_together", transport)
    for log in logs:
        assert [what for what, _ in log][:2] == ["finish", "close"], log
    last = max(log[0][1] for log in logs)
    assert last <= min(log[1][1] for log in logs)


@pytest.mark.parametrize("transport", ["mpi", "shared"])
def test_a_group_is_aborted_when_a_rank_does_not_close_it(
    outcome: Outcome, transport: str
) -> None:
    for log in outcome("close_alone", transport):
        assert log[0][0] == "abort", log


@pytest.mark.parametrize("transport", SHARED)
def test_a_timeout_names_the_missing_rank_and_its_position(
    outcome: Outcome, transport: str
) -> None:
    message = outcome("time_out", transport)[0]
    assert "broadcast #2" in message
    assert "Arrived: ranks 0, 1. Missing: ranks 2, 3." in message
    assert "rank 3: #1 all_reduce((7,), float32, cpu, op=sum)" in message
    assert "Not in any collective: rank 2." in message


def test_a_timeout_of_a_message_names_the_missing_rank(outcome: Outcome) -> None:
    message = outcome("time_out", "mpi")[0]
    assert "Arrived: ranks 0, 1. Missing: ranks 2, 3." in message


def test_a_missing_message_and_a_message_of_another_shape_raise(
    outcome: Outcome,
) -> None:
    outcome("one_message_is_missing")
    outcome("a_message_of_another_shape")


def test_another_thread_sees_the_call_with_cell_and_line(outcome: Outcome) -> None:
    assert outcome("tell_where")[1] == ("barrier", 42, 3)


def test_a_ring_sends_the_fewest_messages_and_elements(outcome: Outcome) -> None:
    for counts in outcome("count_messages", "ring"):
        for length, messages, elements in counts:
            assert messages == 2 * (SIZE - 1)
            assert elements <= 2 * (SIZE - 1) * -(-length // SIZE)


def test_mpi_reduces_large_tensors_in_the_ring(outcome: Outcome) -> None:
    for counts in outcome("count_messages", "mpi"):
        for length, messages, _ in counts:
            assert messages == (2 * (SIZE - 1) if 4 * length >= 1 << 16 else 0)


def test_without_a_group_the_error_has_the_next_step(outcome: Outcome) -> None:
    outcome("no_group_here")


def test_a_killed_rank_leaves_no_shared_memory() -> None:
    before = _left_behind()
    with pytest.raises(RanksFailed, match="rank 1: died"):
        launch(2, FAULTS, "die")
    assert _left_behind() <= before


def _left_behind() -> set[str]:
    # The folders belong to clusters that run at the same time.
    found = Path("/dev/shm").glob("*nbdist*")
    return {path.name for path in found if not path.is_dir()}
