"""Calls of torch.distributed that cannot complete end with an error."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from ranks import failures, launch

CASES_FILE = str(Path(__file__).with_name("blocked_calls.py"))
CASES = [
    "mismatch_shows_each_rank_and_line",
    "mismatch_is_raised_by_the_wait_of_an_async_call",
    "mismatch_in_backward",
    "interrupt_in_barrier",
    "interrupt_in_wait",
    "interrupt_in_receive",
    "release_from_backward",
    "async_calls_keep_their_order",
    "invalid_calls_are_refused",
    "timeout_names_the_missing",
]


@cache
def outcomes() -> list[dict[str, str | None]]:
    """Run all cases in one launch; the results of each rank."""
    return launch(4, CASES_FILE, "run_all_cases", deadline_s=120)


def test_every_case_is_listed() -> None:
    assert list(outcomes()[0]) == CASES


@pytest.mark.parametrize("case", CASES)
def test_a_blocked_call_ends(case: str) -> None:
    found = failures(outcomes(), case)
    assert not found, found
