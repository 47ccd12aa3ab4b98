"""Elastic runs under mpiexec and torchrun, without a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import nbdist
from nbdist.collectives import default_group
from nbdist.errors import CollectiveAborted
from tests.collectives.ranks import launch


def fail_in_the_middle(folder: str) -> list[int]:
    """Train under mpiexec, fail, and check that the last commit is intact."""
    nbdist.init()
    rank, size = nbdist.rank(), nbdist.size()
    death = CollectiveAborted("as if a rank had died")
    weights = torch.full((4,), float(rank))
    state = nbdist.elastic.State(
        Path(folder) / "state", weights=weights, step=0, fails_at=-1
    )

    @nbdist.elastic.run
    def train(state: nbdist.elastic.State) -> int:
        assert state.weights.eq(state.step).all()  # rank 0's, on all ranks
        while state.step < 6:
            if state.step == state.fails_at:
                if rank == size - 1:  # it leaves the commit, in which it is alone
                    threading.Timer(0.1, default_group().abort, [death]).start()
                else:
                    time.sleep(0.5)
            state.step += 1
            state.weights += 1
            state.commit()
        return state.step

    assert train(state) == 6
    state.step, state.fails_at = 0, 3
    state.weights.zero_()
    with pytest.raises(CollectiveAborted, match="as if a rank had died"):
        train(state)
    state.restore()
    assert state.weights.eq(3).all()
    assert weights.eq(3).all()  # it is the tensor that was given
    return [state.step, state.commits]


def test_under_mpiexec_a_failure_raises_and_the_commit_is_kept(tmp_path: Path) -> None:
    results = launch(3, __file__, "fail_in_the_middle", str(tmp_path))
    # 1 + 6 commits of the first run, 1 + 3 of the second.
    assert results == [[3, 11]] * 3
    state = nbdist.elastic.State(weights=torch.zeros(4), step=0, fails_at=0)
    state.load(tmp_path / "state")
    assert (state.step, state.fails_at) == (3, 3)


def test_under_torchrun_an_elastic_run_trains(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import sys
import torch
import torch.distributed as dist
import nbdist

dist.init_process_group("gloo")
state = nbdist.elastic.State(sys.argv[1], step=0, x=torch.full((3,), dist.get_rank()))

@nbdist.elastic.run
def train(state):
    while state.step < 5:
        state.step += 1
        state.x += 1
        state.commit()
    return state.x.tolist()

assert train(state) == [5, 5, 5]
dist.destroy_process_group()  # a thread of gloo's aborts a process that ends before it
"""
    )
    options = ["--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", *options),
            *(str(script), str(tmp_path / "state")),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    state = nbdist.elastic.State(step=0, x=torch.zeros(3, dtype=torch.int64))
    state.load(tmp_path / "state")
    assert state.step == 5
