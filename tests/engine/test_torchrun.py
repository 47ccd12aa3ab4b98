"""`nbdist.init()` under torchrun joins MPI from processes that MPI has not started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from nbdist.ipc.ports import free_ports

N = 3
JOINS = """
import torch, torch.distributed as dist
EARLIER
import nbdist
nbdist.init()
nbdist.init()
x = torch.full((3,), nbdist.rank() + 1.0)
nbdist.all_reduce(x)
y = torch.ones(2)
dist.all_reduce(y)
assert (dist.get_rank(), dist.get_world_size()) == (nbdist.rank(), nbdist.size())
backend = dist.get_backend()
print(f"rank {nbdist.rank()}: {x.tolist()} {y.tolist()} {backend}", flush=True)
if backend == "gloo":  # a thread of gloo's aborts a process that ends before it
    dist.destroy_process_group()
"""
FAILS = """
import sys, torch, nbdist
nbdist.init()
if nbdist.rank() == 1:
    raise ValueError("broken on purpose")
nbdist.all_reduce(torch.ones(2))
"""

SERVES_THE_STORE = """
import os, subprocess, sys, time
from pathlib import Path
import torch.distributed

torchs = sys.modules["torch.distributed.rendezvous"]
gone = Path(os.environ["TMPDIR"]) / "gone"

class Popen(subprocess.Popen):
    def __init__(self, *args, **options):
        gone.touch()  # rank 0 has read the store, and starts mpiexec
        super().__init__(*args, **options)

def rendezvous(url):
    found = next(torchs.of_torch(url))
    while not gone.exists():
        time.sleep(0.01)
    yield found

torchs.of_torch = torchs.rendezvous
if os.environ["RANK"] == "0":
    subprocess.Popen = Popen
else:
    torchs.rendezvous = rendezvous
import nbdist
nbdist.init()
print("joined", nbdist.size())
"""


def torchrun(
    script: str, folder: Path, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(N)]
    return subprocess.run(
        [*run, "--standalone", *options, str(folder / "train.py")],
        env={
            **os.environ,
            "TMPDIR": str(folder),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("earlier", "backend"),
    [("", "nbdist"), ("dist.init_process_group('gloo')", "gloo")],
)
def test_ranks_of_torchrun_join(tmp_path: Path, earlier: str, backend: str) -> None:
    done = torchrun(JOINS.replace("EARLIER", earlier), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    # torchrun's ranks share a pipe: lines may follow each other without a break.
    lines = re.findall(r"rank \d: [^g]*?(?:gloo|nbdist)", done.stdout)
    assert sorted(lines) == [
        f"rank {rank}: [6.0, 6.0, 6.0] [3.0, 3.0] {backend}" for rank in range(N)
    ]
    assert not list(tmp_path.glob("nbdist-*"))


def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    done = torchrun(FAILS, tmp_path)
    assert done.returncode != 0
    assert "broken on purpose" in done.stderr


def test_an_mpi_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    done = torchrun(FAILS, tmp_path, NBDIST_MPIEXEC="/nowhere/mpiexec")
    assert done.returncode != 0
    assert "no MPI launcher at '/nowhere/mpiexec'" in done.stderr


def test_an_mpi_that_is_already_initialised_is_an_error(tmp_path: Path) -> None:
    done = torchrun("from mpi4py import MPI\n" + FAILS, tmp_path)
    assert done.returncode != 0
    assert "import nbdist before mpi4py" in done.stderr


STAYS = """
import os, time, nbdist
nbdist.init()
os.write(1, f"{os.getpid()}\\n".encode())  # whole: the ranks share a pipe
time.sleep(300)
"""


def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STAYS)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*run, "--standalone", str(tmp_path / "train.py")],
        env={**os.environ, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as torchrun_:
        assert torchrun_.stdout is not None
        timer = threading.Timer(100, torchrun_.kill)
        timer.start()
        ranks = [psutil.Process(int(torchrun_.stdout.readline())) for _ in range(2)]
        timer.cancel()
        torchrun_.kill()
    _gone, living = psutil.wait_procs(ranks, timeout=10)
    assert living == []


def test_ranks_join_that_read_rank_0s_store_late(tmp_path: Path) -> None:
    # Without torchrun's agent, rank 0 serves the store.
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SERVES_THE_STORE],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ["joined 2" in text for text in printed] == [True, True], printed
