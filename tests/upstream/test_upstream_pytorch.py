"""PyTorch's own distributed test files, with nbdist in the place of gloo."""

from __future__ import annotations

import pytest
from compare import JOBS, exactly, run_file
from exceptions import PYTORCH
from fetch import why_missing

FILES = [
    "_composable/test_replicate.py",
    "algorithms/test_join.py",
    "checkpoint/test_file_system_checkpoint_cpu.py",
    "optim/test_zero_redundancy_optimizer.py",
    "test_c10d_common.py",
    "test_c10d_gloo.py",
    "test_c10d_object_collectives.py",
    "test_collective_utils.py",
    "test_device_mesh.py",
    "test_pg_wrapper.py",
]
"""Files whose cases make process groups on CPUs and pass with the installed torch."""
QUICK = {"test_c10d_object_collectives.py": ""}
"""Cases for every test run, as regular expressions by file."""

pytestmark = [
    pytest.mark.skipif(bool(why_missing("pytorch")), reason=str(why_missing("pytorch")))
]


@pytest.mark.parametrize("file", QUICK)
def test_some_of_pytorchs_cases_pass(file: str) -> None:
    report = run_file("pytorch", file, JOBS, only=QUICK[file], timeout_s=150)
    known = {
        name: why for name, why in PYTORCH.get(file, {}).items() if name in report.cases
    }
    assert not report.unexpected(known, [])


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("file", FILES)
def test_what_passes_on_gloo_passes(file: str) -> None:
    report = run_file("pytorch", file, JOBS, timeout_s=5400)
    failed = report.failed
    also_fail = _failures_on_gloo(file, failed) if failed else []
    assert not report.unexpected(PYTORCH.get(file, {}), also_fail)


def _failures_on_gloo(file: str, cases: list[str]) -> list[str]:
    on_gloo = run_file(
        "pytorch", file, "--backend=gloo", JOBS, only=exactly(cases), timeout_s=1800
    )
    return on_gloo.failed
