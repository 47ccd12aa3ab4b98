"""Collects the results of the fault matrix for docs/reliability.md."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.reliability.report import Report


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    """The results; NBDIST_WRITE_RELIABILITY=1 writes them into the documentation."""
    report = Report()
    yield report
    if os.environ.get("NBDIST_WRITE_RELIABILITY") and report.complete:
        report.write()
