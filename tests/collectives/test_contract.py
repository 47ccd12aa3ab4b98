"""One contract, over every transport of this machine, at several world sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pretended_hosts import HOSTS_OF_TWO
from ranks import assert_clean, launch

CONTRACT = str(Path(__file__).with_name("contract.py"))
TRANSPORTS = ["shared", "mpi", "ring"]
HOSTS = f"auto, {HOSTS_OF_TWO}"


# Eight ranks on two busy cores are slow.
pytestmark = pytest.mark.timeout(300)
SIZES = [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 8))]
Errors = dict[str, dict[str, list[str | None]]]


@pytest.fixture(scope="module", params=SIZES)
def errors(request: pytest.FixtureRequest) -> Errors:
    """Per transport and case, each rank's error: one launch for each world size."""
    results: list[Errors] = launch(
        request.param, CONTRACT, "run_on_transports", TRANSPORTS, deadline_s=200
    )
    return results[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_contract(errors: Errors, transport: str) -> None:
    assert_clean(errors[transport], transport)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_contract_on_several_hosts(size: int) -> None:
    results: list[Errors] = launch(
        size, CONTRACT, "run_on_transports", [HOSTS], deadline_s=200
    )
    assert_clean(results[0][HOSTS], HOSTS)


@pytest.mark.parametrize("size", [2, 3])
def test_contract_without_the_compiled_part(size: int) -> None:
    name = "shared, in Python"
    results: list[Errors] = launch(
        size, CONTRACT, "run_on_transports", [name], deadline_s=200
    )
    assert_clean(results[0][name], name)
