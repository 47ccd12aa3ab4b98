"""The operations of c10d over this backend."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from ranks import failures, launch

CASES_FILE = str(Path(__file__).with_name("c10d_operations.py"))
CASES = [
    "every_operation_is_answered_or_refused",
    "torch_gets_a_backend_wherever_it_asks",
    "tensors_of_one_call_may_share_memory",
    "a_rank_that_is_no_member_is_refused_as_torch_refuses_it",
    "every_reduce_op_is_answered",
    "premul_sum_everywhere",
    "premul_sum_may_differ_and_be_asynchronous",
    "batches_do_not_wait_for_their_own_receives",
    "batches_are_one_group_of_nccl",
]


@cache
def outcomes() -> list[dict[str, str | None]]:
    """Run all cases in one launch; the results of each rank."""
    return launch(2, CASES_FILE, "run_all_cases", deadline_s=120)


def test_every_case_is_listed() -> None:
    assert list(outcomes()[0]) == CASES


@pytest.mark.parametrize("case", CASES)
def test_operation(case: str) -> None:
    found = failures(outcomes(), case)
    assert not found, found
