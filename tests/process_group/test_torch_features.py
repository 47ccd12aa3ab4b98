"""PyTorch's features on process groups: compile, autograd, hooks, sparse, tools."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from ranks import failures, launch

CASES_FILE = str(Path(__file__).with_name("torch_features.py"))
CASES = [
    "compile_broadcasts",
    "compile_reduces_asynchronously",
    "compile_sends_and_receives",
    "compile_trains_with_ddp",
    "gradients_flow_through_functional_collectives",
    "inference_mode_communicates",
    "views_of_a_leaf_stay_valid",
    "output_lists_may_be_views",
    "ddp_takes_its_builtin_hooks",
    "ddp_trains_with_sparse_gradients",
    "sparse_tensors_are_reduced",
    "other_sparse_calls_raise_on_all_ranks",
    "outputs_of_reduce_scatter_may_differ",
    "short_forms_take_keywords",
    "monitored_barrier_names_the_missing_rank",
    "tools_see_each_operation",
    "an_error_passes_through_the_dispatcher",
    "fake_tensors_communicate_nothing",
    "functional_collectives_write_to_an_output",
    "sharded_tensors_are_gathered_on_the_cpu",
]


@cache
def outcomes() -> list[dict[str, str | None]]:
    """Run all cases in one launch; the results of each rank."""
    return launch(2, CASES_FILE, "run_all_cases", deadline_s=240)


def test_every_case_is_listed() -> None:
    assert list(outcomes()[0]) == CASES


@pytest.mark.parametrize("case", CASES)
def test_feature(case: str) -> None:
    found = failures(outcomes(), case)
    assert not found, found
