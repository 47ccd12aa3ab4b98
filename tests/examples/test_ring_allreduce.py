"""The ring all-reduce notebook, run once from its first cell to its last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TIME_LIMIT_S = 150


def test_it_runs_and_counts_what_a_ring_sends() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "run.py", "ring_allreduce"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Seven elements over four ranks: chunks of 2, 2, 2 and 1, six of them sent.
    assert "[0,3] 6 messages, 10 elements sent" in done.stdout
    assert "[1-2] 6 messages, 11 elements sent" in done.stdout
    assert "step 5 all-gather" in done.stdout
    for algorithm in ("ring", "mpi", "auto"):
        assert f"{algorithm} " in done.stdout
    assert "the ranks called different collectives" in done.stdout
