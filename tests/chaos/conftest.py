"""The cluster on which draws are run, and the report for docs/reliability.md."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.chaos.report import Report
from tests.chaos.reused_cluster import ReusedCluster


@pytest.fixture(scope="module")
def _reused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReusedCluster]:
    reused = ReusedCluster(tmp_path_factory.mktemp("chaos"))
    yield reused
    reused.end()


@pytest.fixture
def reused(
    _reused: ReusedCluster, request: pytest.FixtureRequest
) -> Iterator[ReusedCluster]:
    """A cluster of three ranks. After a draw that fails, the next one gets another."""
    failed = request.session.testsfailed
    yield _reused
    if request.session.testsfailed > failed:
        _reused.close()


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    """The report of all draws; NBDIST_WRITE_RELIABILITY=1 writes it into the page."""
    report = Report()
    yield report
    if os.environ.get("NBDIST_WRITE_RELIABILITY"):
        report.write()
