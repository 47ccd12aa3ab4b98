"""The parent process of a rank, of which there are as many as ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SLOW = {"typing", "dataclasses", "inspect", "traceback", "subprocess"}
"""Modules of the standard library that take as long to import as all others of it."""


def test_a_rank_parent_imports_no_slow_module() -> None:
    program = (
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "import nbdist.ipc.rank_parent\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(done.stdout.split())
    assert "nbdist.ipc.fork_messages" in imported
    assert imported & SLOW == set()
