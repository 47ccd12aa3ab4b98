"""The contract, over what runs on GPUs with the CUDA in it replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import assert_clean, launch

CONTRACT = str(Path(__file__).with_name("contract.py"))
STAND_INS = ["ipc-simulated", "staged-simulated", "mpi-simulated", "direct-simulated"]

pytestmark = pytest.mark.timeout(400)
Errors = dict[str, dict[str, list[str | None]]]


@pytest.fixture(scope="module", params=[2, 3])
def errors(request: pytest.FixtureRequest) -> Errors:
    """Per stand-in and case, each rank's error: one launch for each world size."""
    results: list[Errors] = launch(
        request.param, CONTRACT, "run_on_transports", STAND_INS, deadline_s=350
    )
    return results[0]


@pytest.mark.parametrize("stand_in", STAND_INS)
def test_contract(errors: Errors, stand_in: str) -> None:
    assert_clean(errors[stand_in], stand_in)
