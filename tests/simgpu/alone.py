"""Single cases of `collectives/gpu.py`, and some draws, for mutants.py.

pytest collects this file only when it is named, because `test_gpu.py` runs all cases.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_draws import RANKS, draw
from ranks import assert_clean, failures, launch

FOLDER = Path(__file__).parents[1] / "collectives"
CASES_FILE, CONTRACT = str(FOLDER / "gpu.py"), str(FOLDER / "contract.py")


@pytest.mark.parametrize(
    "case",
    [
        "work_queued_before_and_after_is_ordered",
        "a_stream_of_the_users",
        "calls_on_many_streams",
        "asynchronous_calls",
        "memory_is_not_reused_too_early",
        "calls_for_both_kinds_of_device_alternate",
        "long_runs_of_small_calls",
        "groups_are_closed_while_others_read",
    ],
)
@pytest.mark.parametrize("transport", ["ipc", "staged", "nccl"])
def test_case(transport: str, case: str) -> None:
    arguments = (transport, [case], transport == "nccl")
    found = launch(2, CASES_FILE, "run_cases", *arguments, deadline_s=150)
    assert not failures(found, case), failures(found, case)


@pytest.mark.parametrize("transport", ["ipc", "staged", "nccl"])
def test_contract(transport: str) -> None:
    arguments = ([transport], "cuda", transport == "nccl")
    found = launch(2, CONTRACT, "run_on_transports", *arguments, deadline_s=150)
    assert_clean(found[0][transport], transport)


@pytest.mark.parametrize("transport", ["ipc", "staged", "nccl"])
def test_draws(transport: str) -> None:
    seeds = [seed for seed in range(160) if draw(seed).transport == transport]
    file = str(Path(__file__).with_name("drawn_calls.py"))
    assert launch(RANKS, file, "run", seeds, deadline_s=200) == [None] * RANKS
