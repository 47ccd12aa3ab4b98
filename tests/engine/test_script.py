"""Scripts that a plain `mpiexec` starts, without a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nbdist.clusters.launchers.mpiexec import Mpiexec
from tests.processes import wait_until

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


def mpiexec(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    launcher = Mpiexec()
    return subprocess.run(
        launcher.argv(N, [sys.executable, str(folder / "train.py")]),
        env={
            **os.environ,
            **launcher.environment(N, folder),
            "TMPDIR": str(folder),
            "CUDA_VISIBLE_DEVICES": "",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def running(script: Path) -> list[psutil.Process]:
    """The processes that run a script."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(script) in (process.info["cmdline"] or [])
    ]


def test_ranks_of_mpiexec_join(tmp_path: Path) -> None:
    done = mpiexec(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank}: [6.0, 6.0, 6.0] [3.0, 3.0] cpu" for rank in range(N)
    ]
    assert not list(tmp_path.glob("nbdist-*"))


LEAVES = """
import sys, torch
BEGIN
if rank() == 1:
    print("I leave")
    LEAVE
reduce(torch.ones(2))
"""
PLAIN = "import nbdist; nbdist.init(); from nbdist import rank, all_reduce as reduce"
HOROVOD = (
    "import nbdist.horovod as hvd; hvd.init(); from nbdist.horovod import rank, "
    "allreduce as reduce"
)


@pytest.mark.parametrize(
    ("begin", "leave", "code", "said"),
    [
        (PLAIN, "sys.exit(7)", 7, "I leave"),
        (HOROVOD, "sys.exit(7)", 7, "I leave"),
        (PLAIN, "sys.exit('no data')", 1, "no data"),
        (PLAIN, "raise OSError('no disk')", 1, "OSError: no disk"),
    ],
    ids=["a code", "a code under Horovod", "a message", "an error"],
)
def test_a_rank_that_fails_ends_the_job_with_its_code(
    begin: str, leave: str, code: int, said: str, tmp_path: Path
) -> None:
    script = LEAVES.replace("BEGIN", begin).replace("LEAVE", leave)
    done = mpiexec(script, tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    wait_until(lambda: not running(tmp_path / "train.py"))


CLEAN = """
import sys, threading, torch, nbdist

nbdist.init()
try:
    sys.exit(3)
except SystemExit as error:
    assert error.code == 3
thread = threading.Thread(target=sys.exit, args=(4,))
thread.start()
thread.join()
nbdist.barrier()
sys.exit(0 if nbdist.rank() else None)
"""


def test_a_caught_exit_or_exit_code_0_is_not_a_failure(tmp_path: Path) -> None:
    done = mpiexec(CLEAN, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.glob("nbdist-*"))


def test_without_a_launcher_the_error_has_the_next_step() -> None:
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
