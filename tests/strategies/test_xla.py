"""Tensors on XLA's CPU device: operations, messages, DDP, and the strategy TPU.

The tests need torch_xla, which the project's environment lacks. docs/gpus.md has the
commands that make one with it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import launch

FUNCTIONS = str(Path(__file__).with_name("device_functions.py"))
RANKS = 2

pytest.importorskip("torch_xla", reason="needs torch_xla: see docs/gpus.md")
pytestmark = pytest.mark.timeout(320)


@cache
def found() -> list[dict[str, Any]]:
    """Run all cases in one launch; the results of each rank."""
    environment = {"PJRT_DEVICE": "CPU"}
    return launch(
        RANKS,
        FUNCTIONS,
        "run_on_xla",
        deadline_s=300,
        environment=environment,
        forked=False,  # torch_xla reads it when it is imported
    )


def test_every_operation_goes_through_host_memory() -> None:
    for here in found():
        assert all(here["operations"]), here["operations"]
        assert "staged through host memory (XLA)" in here["transport"]


def test_tensors_on_other_kinds_of_device_are_a_mismatch() -> None:
    for here in found():
        assert "xla" in here["mismatch"]
        assert here["mismatch"].endswith("[1.0, 1.0, 1.0]")  # no data was touched


def test_a_message_arrives() -> None:
    assert found()[1]["messages"] == [7.0, 7.0, 7.0]


@pytest.mark.parametrize("case", ["tpu sgd", "tpu adam", "mirrored", "mirrored adam"])
def test_ranks_end_with_the_weights_of_one_process(case: str) -> None:
    first, second = (here[case] for here in found())
    assert torch.equal(first["weights"], second["weights"])
    assert first["distance"] < 1e-9  # float64


def test_a_model_on_another_device_is_refused() -> None:
    assert "model.to(strategy.device)" in found()[0]["refused"]
