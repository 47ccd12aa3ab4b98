"""DDP, FSDP2, tensor, pipeline and context parallelism, and checkpoints."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from ranks import failures, launch

CASES_FILE = str(Path(__file__).with_name("training.py"))
CASES = [
    "ddp_sgd", "ddp_adamw", "ddp_join", "ddp_unused", "ddp_no_sync", "ddp_fp16",
    "ddp_power_sgd", "fsdp", "tensor_parallel", "pipeline_gpipe", "pipeline_1f1b",
    "context_ulysses", "context_ring", "checkpoint",
]  # fmt: skip


SIZES = [4, pytest.param(8, marks=pytest.mark.slow)]


@cache
def outcomes(size: int) -> list[dict[str, str | None]]:
    """Run all cases in one launch; the results of each rank."""
    return launch(size, CASES_FILE, "run_all_cases", deadline_s=300)


def test_every_case_is_listed() -> None:
    assert list(outcomes(4)[0]) == CASES


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_matches_a_single_process(case: str, size: int) -> None:
    found = failures(outcomes(size), case)
    assert not found, found
