"""The cluster on which draws are played, and the report for docs/reliability.md."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.chaos.report import Report
from tests.chaos.stage import Stage


@pytest.fixture(scope="module")
def _stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("chaos"))
    yield stage
    stage.end()


@pytest.fixture
def stage(_stage: Stage, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A cluster of three ranks. After a draw that fails, the next one gets another."""
    failed = request.session.testsfailed
    yield _stage
    if request.session.testsfailed > failed:
        _stage.close()


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    """The report of all draws; NBDIST_WRITE_RELIABILITY=1 writes it into the page."""
    report = Report()
    yield report
    if os.environ.get("NBDIST_WRITE_RELIABILITY"):
        report.write()
