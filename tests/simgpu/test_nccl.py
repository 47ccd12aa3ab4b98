"""The simulated NCCL, under torch.distributed's own backend."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import failures, launch, once

from tests.gpu_marks import GPUS, needs_gpus, simulated

CASES_FILE = str(Path(__file__).with_name("nccl_cases.py"))
RANK_FILE = str(Path(__file__).with_name("rank_of_two.py"))
CASES = [
    "every_reduction", "factors_of_a_sum", "every_movement", "unequal_parts",
    "messages", "streams_are_ordered", "many_at_once", "groups_of_some_ranks",
    "groups_are_divided", "data_parallel", "abort_ends_a_wait", "an_error_is_told",
]  # fmt: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    simulated,
    needs_gpus(2),
]


@once
def outcomes(size: int) -> list[dict[str, str | None]]:
    """Run all cases in one launch; the results of each rank."""
    return launch(size, CASES_FILE, "run_cases", CASES, deadline_s=200)


@pytest.mark.streams
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4)]
)
def test_case(size: int, case: str) -> None:
    if size > GPUS:
        pytest.skip(f"needs {size} GPUs")
    found = failures(outcomes(size), case)
    assert not found, found


def test_the_others_wait_for_a_dead_rank_until_they_abort(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, RANK_FILE, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].communicate(timeout=100)[0].split() == ["waits", "released"]
        assert ranks[1].wait(10) == -signal.SIGKILL
    finally:
        for each in ranks:
            each.kill()
            each.communicate()


def test_two_ranks_on_one_gpu_are_refused() -> None:
    for text in launch(2, CASES_FILE, "on_one_gpu"):
        assert "Duplicate GPU detected" in text
