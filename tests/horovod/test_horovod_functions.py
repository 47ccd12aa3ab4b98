"""Each of Horovod's functions, over dtypes and dimensions, on 1, 2, 3 and 4 ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from ranks import failures, launch

CASES_FILE = str(Path(__file__).with_name("functions.py"))
CASES = [
    "world", "init_with_some_ranks", "allreduce_sum", "allreduce_average",
    "allreduce_min_max_product", "allreduce_is_scaled", "allreduce_of_any_layout",
    "allreduce_of_none", "allreduce_compressed", "grouped_allreduce",
    "allreduce_adasum", "sparse_allreduce", "errors_have_horovods_names",
    "allgather", "allgather_where_some_have_nothing",
    "grouped_allgather", "broadcast", "alltoall", "alltoall_evenly", "reducescatter",
    "allreduce_gradients", "allgather_gradients", "broadcast_gradients",
    "alltoall_gradients", "reducescatter_gradients", "names_match_in_any_order",
    "names_match_across_operations", "one_rank_is_late_with_a_name",
    "poll_does_not_wait", "a_name_can_be_used_once_at_a_time",
    "mismatches_name_the_calls", "bad_arguments_are_refused", "join_contributes_zeros",
    "calls_that_cannot_continue_without_a_joined_rank", "process_sets", "objects",
    "parameters_are_broadcast", "optimizer_state_is_broadcast_by_value",
    "timeline", "a_timeline_of_the_environment",
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


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_function(size: int, case: str) -> None:
    found = failures(outcomes(size), case)
    assert not found, found
