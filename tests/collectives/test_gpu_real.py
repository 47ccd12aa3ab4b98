"""What only a real GPU can show: speed, graphs, the driver's memory, compiled kernels.

A simulated GPU has CUDA's functions, but neither its speed nor its kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import launch

from tests.gpu_marks import NEEDS_A_REAL_GPU, needs_gpus

CASES = str(Path(__file__).with_name("gpu_real.py"))

pytestmark = [*NEEDS_A_REAL_GPU, pytest.mark.timeout(400)]


def test_ranks_on_one_gpu_are_ten_times_as_fast_as_gloo() -> None:
    seconds = launch(4, CASES, "speeds", deadline_s=200)[0]
    assert seconds["gloo"] / seconds["nbdist"] >= 10, seconds


@needs_gpus(2)
def test_a_collective_of_nccl_is_captured_in_a_graph() -> None:
    launch(2, CASES, "a_captured_graph", deadline_s=200)


def test_a_graph_that_would_capture_a_collective_of_cuda_ipc_is_refused() -> None:
    launch(2, CASES, "a_refused_capture")


def test_memory_in_expandable_segments_is_reduced() -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    launch(2, CASES, "sums_are_right", deadline_s=200, environment=environment)


def test_a_compiled_model_has_the_same_weights_on_all_ranks() -> None:
    assert launch(2, CASES, "a_compiled_model", deadline_s=300) == [0.0, 0.0]
