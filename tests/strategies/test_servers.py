"""ParameterServer: three workers and a server, or two and two."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ranks import launch

FUNCTIONS = str(Path(__file__).with_name("server_functions.py"))
RANKS, SERVER = 4, 3
SCRIPT = [0, 0, 1, 2, 0, 1, 1, 2, 2, 2, 0, 2, 1]


@cache
def found() -> list[dict[str, Any]]:
    """Run all cases in one launch; the results of each rank."""
    return launch(RANKS, FUNCTIONS, "run_all_functions", deadline_s=150)


@pytest.mark.parametrize("case", ["sync sgd", "sync adam", "sync, 2 servers"])
def test_synchronous_training_equals_one_process_on_the_global_batches(
    case: str,
) -> None:
    # As Mirrored does; in float64, on the servers too.
    assert [here[case] < 1e-9 for here in found()] == [True] * RANKS


@pytest.mark.parametrize("name", ["sync", "sync, 2 of 3", "async", "async, bounded"])
def test_the_accuracy_on_digits_is_that_of_one_process(name: str) -> None:
    for here in found():
        accuracies = here["accuracies"]
        assert accuracies["alone"] > 0.9
        assert abs(accuracies["Mirrored"] - accuracies["alone"]) < 1e-9
        assert accuracies[name] >= accuracies["alone"] - 0.01, accuracies
        assert accuracies[name] == found()[0]["accuracies"][name]


def test_gradients_are_sent_where_the_ranks_share_no_memory() -> None:
    for here in found():
        accuracy, sends = here["async, sent"]
        assert sends == [True, False]
        assert accuracy >= here["accuracies"]["alone"] - 0.01


def test_the_staleness_of_each_gradient_is_counted() -> None:
    expected: Counter[int] = Counter()
    pulled = {0: 0, 1: 0, 2: 0}
    for version, worker in enumerate(SCRIPT):
        expected[version - pulled[worker]] += 1
        pulled[worker] = version + 1
    assert max(expected) > 2  # a script that says something
    assert [here["staleness"] for here in found()] == [dict(expected)] * RANKS


def test_no_worker_is_ahead_by_more_than_the_bound() -> None:
    for rank, here in enumerate(found()):
        ahead, lead = here["bound"]
        watched = rank in (0, SERVER)  # worker 0 looks, and the server returns its word
        # As far as they may, and never further.
        assert ahead == ([2, 2, 2, 2, 2, 1] if watched else [])
        assert lead == 2


def test_a_straggler_is_dropped() -> None:
    for here in found():
        assert here["backup"] == (3, 1, {0: 6, 3: 1})


def test_an_idle_server_sleeps() -> None:
    sleeps = found()[SERVER]["idle"]
    assert sleeps == sorted(sleeps)
    assert sleeps[-3:] == [0.05] * 3
    assert len(sleeps) < 30, "it wakes some 20 times before it sleeps its longest"


def test_a_failed_worker_does_not_stop_the_others() -> None:
    for rank, here in enumerate(found()):
        sync_end, sync_again, sync_updates, end, again, updates = here["failure"]
        expected = "worker 1 cannot" if rank == 1 else f"done by {rank % SERVER}"
        assert (sync_end, end) == (expected, expected)
        assert sync_again == again == "again"
        assert sync_updates == 5 + 1  # all five, and one of all three again
        assert updates == 5 + 2 + 5 + 3


def test_a_scheduler_changes_the_rate_of_the_servers() -> None:
    assert max(here["schedule"] for here in found()) < 1e-12


def test_reductions_are_over_the_workers() -> None:
    for rank, here in enumerate(found()):
        inside, outside, local = here["reduce"]
        assert inside == {"a": 3.0, "b": [3.0]}
        assert outside == [1.0]
        assert local == (() if rank == SERVER else (rank,))


def test_a_server_keeps_only_the_state_of_its_shard() -> None:
    states = [here["memory"] for here in found()]
    assert states[:2] == [0, 0]
    assert sum(states[2:]) == 4
    assert min(states[2:]) > 0


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    expected = [
        "mode='fast'", "max_staleness=1", "max_staleness=-1", "replicas=2",
        "n_ps=2 of 2 ranks", "replicas=3", "call setup", "outside of run()",
    ]  # fmt: skip
    for messages in launch(2, FUNCTIONS, "refusals"):
        assert len(messages) == len(expected), messages
        for part, message in zip(expected, messages, strict=True):
            assert part in message
