"""The example for marimo, as a script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("marimo", reason="pip install marimo installs it")

SCRIPT = Path(__file__).parents[2] / "examples" / "marimo_digits.py"


def test_it_trains_on_the_number_of_ranks_that_is_given():
    run = subprocess.run(
        [sys.executable, SCRIPT, "--", "--ranks", "3"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "5 epochs of 1347 images" in run.stdout
    assert "[0-2]" in run.stdout
    accuracy = re.search(r"^accuracy (\S+)$", run.stdout, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.85
