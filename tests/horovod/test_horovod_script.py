"""One training script, in a cell, by mpiexec and by torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist import Cluster
from nbdist.clusters.launchers.mpiexec import Mpiexec

SCRIPT = Path(__file__).with_name("digits.py")
N = 4
LAUNCHED = 2  # each imports torch
TIME_LIMIT_S = 100


def check(printed: str, n: int) -> str:
    """Check that the script has learned. Returns the lines that it printed."""
    found = re.search(rf"ranks: {n}, loss: [\d.]+, accuracy: ([\d.]+)%", printed)
    assert found is not None, printed
    assert float(found[1]) > 90
    assert "all ranks alike: True" in printed
    return found[0]


def by_mpiexec(folder: Path) -> list[str]:
    return Mpiexec().argv(LAUNCHED, [sys.executable, str(SCRIPT)])


def by_torchrun(folder: Path) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*run, "--nproc-per-node", str(LAUNCHED), str(SCRIPT)]


@pytest.mark.parametrize("command", [by_mpiexec, by_torchrun])
def test_the_script_trains_under_a_launcher(command: object, tmp_path: Path) -> None:
    assert callable(command)
    done = subprocess.run(
        command(tmp_path),
        env={
            **os.environ,
            **Mpiexec().environment(LAUNCHED, tmp_path),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout, LAUNCHED)
    assert not list(tmp_path.glob("nbdist-*"))


def test_the_script_trains_in_a_cell(cluster: Cluster) -> None:
    first = cluster.execute(SCRIPT.read_text(encoding="utf-8"))
    printed = check(first[0].stdout, N)
    assert [first[rank].stdout for rank in range(1, N)] == ["", "", ""]
    again = cluster.execute(SCRIPT.read_text(encoding="utf-8"))  # run once more
    assert check(again[0].stdout, N) == printed
