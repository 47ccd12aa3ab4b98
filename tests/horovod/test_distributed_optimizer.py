"""DistributedOptimizer against one process on the full batch, on 1, 2 and 4 ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from ranks import failures, launch

CASES_FILE = str(Path(__file__).with_name("optimizers.py"))
CASES = [
    "sgd", "momentum", "adam", "adamw", "any_buckets", "predivided", "summed",
    "compressed", "accumulated", "clipped", "with_a_closure",
    "with_a_schedule_and_state", "wrapped_again", "unused_and_frozen",
    "layers_in_another_order_on_each_rank", "sparse", "uneven_data",
    "among_some_ranks", "outside_of_the_process_set", "state_broadcast_between_steps",
    "adasum", "sync_batch_norm", "zero_grad_while_reducing",
    "more_passes_than_said", "bad_options",
]  # fmt: skip


@cache
def outcomes(size: int) -> list[dict[str, str | None]]:
    """Run all cases in one launch; the results of each rank."""
    patience = {"NBDIST_COLLECTIVE_TIMEOUT": "20"}
    return launch(
        size, CASES_FILE, "run_all_cases", deadline_s=150, environment=patience
    )


def test_every_case_is_listed() -> None:
    assert list(outcomes(1)[0]) == CASES


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_training(size: int, case: str) -> None:
    found = failures(outcomes(size), case)
    assert not found, found
