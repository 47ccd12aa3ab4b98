"""Repeated starts and stops leave no more than the first one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MOST_GROWTH = 1.05
"""Of resident memory, since the first stop."""
EACH_WITHIN_S = 60.0


def after_each_stop(times: int, temporary: Path) -> list[dict[str, Any]]:
    """The counts that leak_work.py prints after each stop."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.clusters.leak_work", str(times)],
        env={**os.environ, "TMPDIR": str(temporary)},
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=times * EACH_WITHIN_S,
        check=True,
    )
    lines = done.stdout.splitlines()
    counted = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(counted) == times
    return counted


@pytest.mark.parametrize(
    "times",
    [
        3,
        pytest.param(
            30, marks=[pytest.mark.slow, pytest.mark.timeout(30 * EACH_WITHIN_S)]
        ),
    ],
)
def test_later_stops_leave_no_more_than_the_first_stop(
    times: int, tmp_path: Path
) -> None:
    first, *_, last = after_each_stop(times, tmp_path)
    resident = [each.pop("resident_bytes") for each in (first, last)]
    assert last == first
    assert first["processes"] == 0
    assert first["temporary"] == []
    assert first["memory folder"] is False
    assert resident[1] < MOST_GROWTH * resident[0]
