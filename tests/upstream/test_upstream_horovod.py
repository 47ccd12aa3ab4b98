"""Horovod's own test files, with `horovod.torch` answered by nbdist.horovod."""

from __future__ import annotations

import pytest
from compare import JOBS, run_file
from exceptions import HOROVOD, HOROVOD_ON_ONE, HOROVOD_ON_SEVERAL, HOROVOD_RACES
from fetch import why_missing

FILES = [
    "parallel/test_torch.py",
    "parallel/test_adasum_pytorch.py",
    "single/test_torch_elastic.py",
]
QUICK = {
    "parallel/test_torch.py": "allreduce_average|broadcast_state$|grouped_allgather$",
    "single/test_torch_elastic.py": "",
}
"""Cases for every test run, as regular expressions by file."""

pytestmark = [
    pytest.mark.skipif(bool(why_missing("horovod")), reason=str(why_missing("horovod")))
]


def exceptions(file: str, n: int) -> dict[str, str]:
    further = HOROVOD_ON_SEVERAL if n > 1 else HOROVOD_ON_ONE
    return {**HOROVOD.get(file, {}), **further.get(file, {})}


@pytest.mark.parametrize("file", QUICK)
def test_some_of_horovods_cases_pass(file: str) -> None:
    report = run_file("horovod", file, "-n2", JOBS, only=QUICK[file], timeout_s=150)
    known = exceptions(file, 2)
    met = {name: why for name, why in known.items() if name in report.cases}
    assert not report.unexpected(met, [])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("file", FILES)
def test_horovods_cases_pass(file: str, n: int) -> None:
    report = run_file("horovod", file, f"-n{n}", JOBS, timeout_s=3500)
    assert not report.unexpected(exceptions(file, n), [*HOROVOD_RACES.get(file, {})])
