"""The contract, over the transports for GPUs with a simulated CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import assert_clean, launch

CONTRACT = str(Path(__file__).with_name("contract.py"))
SIMULATED = ["ipc-simulated", "staged-simulated", "mpi-simulated", "direct-simulated"]

pytestmark = pytest.mark.timeout(400)
Errors = dict[str, dict[str, list[str | None]]]


@pytest.fixture(scope="module", params=[2, 3])
def errors(request: pytest.FixtureRequest) -> Errors:
    """Each rank's error, by transport and case. Each world size is launched once."""
    results: list[Errors] = launch(
        request.param, CONTRACT, "run_on_transports", SIMULATED, deadline_s=350
    )
    return results[0]


@pytest.mark.parametrize("transport", SIMULATED)
def test_contract(errors: Errors, transport: str) -> None:
    assert_clean(errors[transport], transport)
