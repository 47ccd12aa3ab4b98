"""Mirrored, CentralStorage and LocalSGD on four ranks, against one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ranks import launch

FUNCTIONS = str(Path(__file__).with_name("replica_functions.py"))
RANKS = 4
EXACT = [
    "mirrored sgd", "mirrored adam", "mirrored ring", "central sgd", "central adam",
    "local every 1", "mirrored devices", "multi-worker mirrored", "one device",
]  # fmt: skip


@cache
def found() -> list[dict[str, Any]]:
    """Run all cases in one launch; the results of each rank."""
    return launch(RANKS, FUNCTIONS, "run_all_functions", deadline_s=120)


@pytest.mark.parametrize("case", EXACT)
def test_training_equals_one_process_on_the_global_batches(case: str) -> None:
    # float64, and a last batch of 93 samples over 4 ranks.
    assert [here[case]["distance"] < 1e-9 for here in found()] == [True] * RANKS


def test_the_mean_of_the_losses_is_the_global_one() -> None:
    losses = [here["mirrored sgd"]["losses"] for here in found()]
    assert losses == [losses[0]] * RANKS
    assert losses[0] == pytest.approx(found()[0]["central sgd"]["losses"], abs=1e-9)


@pytest.mark.parametrize(
    "name", ["Mirrored", "CentralStorage", "LocalSGD", "LocalSGD with state"]
)
def test_the_accuracy_on_digits_is_that_of_one_process(name: str) -> None:
    for here in found():
        accuracies = here["accuracies"]
        assert accuracies["alone"] > 0.93
        assert accuracies[name] >= accuracies["alone"] - 0.01, accuracies
        assert accuracies[name] == found()[0]["accuracies"][name]


def test_central_storage_keeps_one_optimizer_state() -> None:
    assert [here["central state"] for here in found()] == [4, 0, 0, 0]


def test_local_models_diverge_and_are_averaged_every_third_step() -> None:
    expected = [False, False, True] * 2
    assert [here["drift"] for here in found()] == [expected] * RANKS


def test_reductions() -> None:
    for rank, here in enumerate(found()):
        expected = (6.0, 6.0, [6, 6], 1.5, 3.0, (rank,), [rank, rank])
        assert here["reduce"] == expected


def test_reductions_along_an_axis_weigh_each_row_the_same() -> None:
    total = float(sum(rank * (rank + 1) for rank in range(RANKS)))
    mean = total / sum(range(1, RANKS + 1))
    expected = [[total] * 2, [mean] * 2, [0.0] * 2, [RANKS - 1.0] * 2, 6.0]
    assert [here["reduce axis"] for here in found()] == [expected] * RANKS


def test_a_function_divides_the_data_by_its_input_context() -> None:
    parts = [here["from function"] for here in found()]
    assert parts == [[2 * rank, 2 * rank + 1] for rank in range(RANKS)]


def test_every_sample_is_in_exactly_one_part() -> None:
    shares = [here["shares"] for here in found()]
    assert [[own for own, _ in each] for each in shares] == [
        [2, 1], [2, 1], [2, 0], [2, 0],
    ]  # fmt: skip
    assert [[whole for _, whole in each] for each in shares] == [[8, 2]] * RANKS


def test_a_scheduler_changes_the_rate_of_central_storage() -> None:
    assert max(here["schedule"] for here in found()) < 1e-12


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    expected = [
        "algorithm='tree'", "algorithm 'nccl' on cpu", "root=7", "every=0",
        "call setup", "reduce('xor'", "reduce() got a str", "global_batch_size is 0",
        "a data set with a length", "LBFGS",
        "computes on cpu, not on cuda", "one for each of the 2 ranks",
        "device 'abacus:0': expected a name", "communication='tree'",
        "device='/gpu:0': this rank computes on cpu", "does not drive Keras's fit",
        "reduce(axis=1) of a tensor of shape (2,)", "not a multiple of the 2 replicas",
    ]  # fmt: skip
    for messages in launch(2, FUNCTIONS, "refusals"):
        assert len(messages) == len(expected), messages
        for part, message in zip(expected, messages, strict=True):
            assert part in message
