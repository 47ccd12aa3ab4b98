"""Where the system refuses something, ranks start in another way, or the error says it.

Each case runs refused_work.py in a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nbdist.ipc import private_files
from tests.seed import SEED

ROOT = Path(__file__).parents[2]
WITHIN_S = 300.0
WORK = [sys.executable, "-m", "tests.clusters.refused_work"]


def found_with(*before: str, **variables: str) -> dict[str, Any]:
    """What the work prints, behind another program and with other variables."""
    done = subprocess.run(
        [*before, *WORK],
        env={**os.environ, **variables},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=WITHIN_S,
        check=True,
    )
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def test_ranks_start_and_are_replaced_where_pidfd_open_is_refused() -> None:
    number = random.Random(SEED).choice(["ENOSYS", "EPERM"])
    filtered = [sys.executable, str(ROOT / "tests" / "without_pidfd.py"), number]
    found = found_with(*filtered)
    assert found["started"] == "this kernel or container refuses pidfd_open"
    assert "rank 1" in found["death"]
    assert "SIGKILL" in found["death"]
    assert (found["first"], found["kept"], found["size"]) == ([0, 1], [5, 5], 2)


ODD = "a 'b' \"c\" 100% {d} \\e ~ * ünï\nnext"


@pytest.mark.parametrize("name", [ODD, "$HOME"])
def test_a_temporary_folder_with_an_odd_name_is_used_or_left_out(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    found = found_with(TMPDIR=str(folder))
    assert (found["first"], found["kept"]) == ([0, 1], [5, 5])


def test_a_folder_that_looks_like_a_variable_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my$HOME"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert folder not in private_files.make_run_folder().parents
    monkeypatch.setattr(private_files, "MEMORY_FOLDER", tmp_path / "none")
    with pytest.raises(OSError, match=r'my\$HOME has "\$" in its path'):
        private_files.make_run_folder()
