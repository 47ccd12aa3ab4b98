"""A plain `mpiexec python train.py`: the world without a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nbdist.cluster.launchers.mpiexec import Mpiexec

SCRIPT = """
import nbdist, torch, torch.distributed as dist

nbdist.init()
nbdist.init()
x = torch.full((3,), nbdist.rank() + 1.0)
nbdist.all_reduce(x)
y = torch.ones(2)
dist.all_reduce(y)
nbdist.log(loss=1.0)
assert (dist.get_rank(), dist.get_world_size()) == (nbdist.rank(), nbdist.size())
print(f"rank {nbdist.rank()}: {x.tolist()} {y.tolist()} {nbdist.device()}", flush=True)
"""
N = 3


def test_ranks_of_a_plain_mpiexec_join(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = Mpiexec()
    done = subprocess.run(
        launcher.argv(N, [sys.executable, str(tmp_path / "train.py")]),
        env={
            **os.environ,
            **launcher.environment(N, tmp_path),
            "TMPDIR": str(tmp_path),
            "CUDA_VISIBLE_DEVICES": "",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank}: [6.0, 6.0, 6.0] [3.0, 3.0] cpu" for rank in range(N)
    ]
    assert not list(tmp_path.glob("nbdist-*"))


def test_without_a_launcher_the_next_step_is_said() -> None:
    # In a process of its own: to import MPI here would make this one a rank.
    done = subprocess.run(
        [sys.executable, "-c", "import nbdist; nbdist.init()"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert "WrongProcess" in done.stderr
    assert "mpiexec -n 4 python" in done.stderr
