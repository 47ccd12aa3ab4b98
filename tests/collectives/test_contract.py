"""One contract, over every transport of this machine, at several world sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import launch

CONTRACT = str(Path(__file__).with_name("contract.py"))
TRANSPORTS = ["shared", "mpi", "ring"]


# Eight ranks on two busy cores take their time.
pytestmark = pytest.mark.timeout(300)
Errors = dict[str, dict[str, list[str | None]]]


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 5, 8])
def errors(request: pytest.FixtureRequest) -> Errors:
    """Per transport and case, each rank's error: one launch for each world size."""
    results: list[Errors] = launch(
        request.param, CONTRACT, "run_all", TRANSPORTS, deadline_s=200
    )
    return results[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_contract(errors: Errors, transport: str) -> None:
    failures = [
        f"{case}, rank {rank}:\n{error}"
        for case, per_rank in errors[transport].items()
        for rank, error in enumerate(per_rank)
        if error is not None
    ]
    assert errors[transport]
    assert not failures, "\n".join(failures)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_contract_on_a_shared_gpu(size: int) -> None:
    results: list[Errors] = launch(
        size, CONTRACT, "run_all", ["auto", "mpi"], "cuda", deadline_s=200
    )
    for per_case in results[0].values():
        assert per_case
        failures = [error for row in per_case.values() for error in row if error]
        assert not failures, "\n".join(failures)
