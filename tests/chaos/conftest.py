"""The cluster on which draws are run, and the report for docs/reliability.md."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.chaos.report import Report
from tests.chaos.reused_cluster import ReusedCluster
from tests.chaos.reused_cluster import reused as reused


@pytest.fixture(scope="module")
def _reused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReusedCluster]:
    reused = ReusedCluster(tmp_path_factory.mktemp("chaos"))
    yield reused
    reused.end()


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    """The report of all draws; NBDIST_WRITE_RELIABILITY=1 writes it into the page."""
    report = Report()
    yield report
    if os.environ.get("NBDIST_WRITE_RELIABILITY"):
        report.write()
