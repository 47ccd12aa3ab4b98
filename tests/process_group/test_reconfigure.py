"""Process groups change their members in place, as c10d's `reconfigure` asks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from ranks import failures, launch

CASES_FILE = str(Path(__file__).with_name("reconfigured.py"))
CASES = [
    "members_leave_and_return",
    "each_rank_is_alone_and_all_merge",
    "a_rank_may_leave_as_soon_as_it_is_a_member",
    "ddp_averages_over_the_new_members",
    "calls_under_way_end",
    "an_abort_is_undone",
    "an_abort_releases_a_rank_that_waits",
    "a_missing_rank_is_a_timeout",
    "wrong_handles_are_refused",
    "torchs_functions_call_it",
]


@cache
def outcomes() -> list[dict[str, str | None]]:
    """Run all cases in one launch; the results of each rank."""
    return launch(3, CASES_FILE, "run_all_cases", deadline_s=120)


def test_every_case_is_listed() -> None:
    assert list(outcomes()[0]) == CASES


@pytest.mark.parametrize("case", CASES)
def test_reconfigure(case: str) -> None:
    found = failures(outcomes(), case)
    assert not found, found
