"""The stage of the draws, and what came of them, for docs/reliability.md."""

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
    """Three ranks. A draw that fails takes them down, so that the next has new ones."""
    failed = request.session.testsfailed
    yield _stage
    if request.session.testsfailed > failed:
        _stage.close()


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    """What held; NBDIST_WRITE_RELIABILITY=1 writes it into the documentation."""
    report = Report()
    yield report
    if os.environ.get("NBDIST_WRITE_RELIABILITY"):
        report.write()
