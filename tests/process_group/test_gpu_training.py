"""Training on GPUs over the backend. The ranks share a GPU, or have one each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import failures, launch, once

from tests.gpu_marks import needs_gpus

CASES_FILE = str(Path(__file__).with_name("training.py"))
BATCHES = str(Path(__file__).with_name("batches.py"))
CASES = [
    "ddp_sgd", "ddp_adamw", "ddp_join", "ddp_unused", "ddp_no_sync", "ddp_fp16",
    "ddp_power_sgd", "fsdp", "tensor_parallel", "pipeline_gpipe", "pipeline_1f1b",
    "checkpoint",
]  # fmt: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.streams,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
needs_four = needs_gpus(4)
needs_two = needs_gpus(2)


@once
def outcomes(own_gpus: bool) -> list[dict[str, str | None]]:
    """Run all cases in one launch; the results of each rank."""
    return launch(4, CASES_FILE, "run_all_cases", "cuda", own_gpus, deadline_s=300)


def case_holds(case: str, own_gpus: bool) -> None:
    found = failures(outcomes(own_gpus), case)
    assert not found, found


@pytest.mark.parametrize("case", CASES)
def test_on_a_shared_gpu(case: str) -> None:
    case_holds(case, own_gpus=False)


@needs_four
@pytest.mark.parametrize("case", CASES)
def test_over_nccl(case: str) -> None:
    case_holds(case, own_gpus=True)


def test_a_batch_of_messages_on_a_shared_gpu() -> None:
    launch(3, BATCHES, "exchange", False)


@needs_two
def test_a_batch_of_messages_over_nccl() -> None:
    launch(2, BATCHES, "exchange", True)
