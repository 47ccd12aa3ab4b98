"""Runs an example notebook as `examples/run.py` does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RUN = Path(__file__).parent.parent.parent / "examples" / "run.py"
TIME_LIMIT_S = 150


@pytest.fixture
def run_example() -> Callable[..., str]:
    """A function that runs a notebook, given its name, and returns what it prints."""

    def run(name: str, time_limit_s: float = TIME_LIMIT_S) -> str:
        done = subprocess.run(
            [sys.executable, RUN, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=time_limit_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
