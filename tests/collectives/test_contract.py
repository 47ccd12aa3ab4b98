"""One contract, over every transport of this machine, at several world sizes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from ranks import launch

CONTRACT = str(Path(__file__).with_name("contract.py"))
TRANSPORTS = ["shared", "mpi", "ring"]


@cache
def outcomes(size: int) -> dict[str, dict[str, list[str | None]]]:
    """Per transport and case, each rank's error: one launch for all of them."""
    results = launch(size, CONTRACT, "run_all", TRANSPORTS, deadline_s=150)
    return results[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_contract(size: int, transport: str) -> None:
    failures = {
        f"{case}, rank {rank}": error
        for case, errors in outcomes(size)[transport].items()
        for rank, error in enumerate(errors)
        if error is not None
    }
    assert not failures, "\n".join(
        f"{name}:\n{text}" for name, text in failures.items()
    )
