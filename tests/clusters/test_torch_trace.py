"""torch's own analyzer reads the saved collectives, and finds what went wrong."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import CellError, Cluster
from nbdist.errors import UsageError
from tests.processes import stop, wait_until

pytest.importorskip(
    "torch.distributed.flight_recorder", reason="torch 2.7 comes without the analyzer"
)
DEADLINE_S = 30.0
CALLS = (
    "for _ in range(3):\n"
    "    nbdist.all_reduce(torch.ones(4))\n"
    "parts = [torch.empty(2, 3) for _ in range(world_size)]\n"
    "nbdist.all_gather(parts, torch.ones(2, 3))\n"
    "nbdist.reduce_scatter(torch.empty(5), [torch.ones(5)] * world_size)\n"
    "nbdist.broadcast_object({}, 1)\n"
    "nbdist.barrier()\n"
    "dist.send(torch.ones(1), 1) if rank == 0 else None\n"
    "dist.recv(torch.ones(1), 0) if rank == 1 else None\n"
)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three ranks without earlier calls, which the analyzer would find too."""
    with Cluster(n=3, device="cpu", threads=1) as running:
        yield running


def analyzed(folder: Path) -> str:
    """What torch's analyzer says of the files in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout + done.stderr


def test_calls_that_agree(cluster: Cluster, tmp_path: Path) -> None:
    cluster.execute(CALLS)
    folder = tmp_path / "new" / "folder"
    files = cluster.collectives().save(folder)
    assert [file.name[-6:] for file in files] == [f"rank_{rank}" for rank in range(3)]
    text = analyzed(folder)
    assert "Collective sequence number" not in text
    assert "Not all ranks" not in text
    trace = pickle.loads(files[2].read_bytes())
    names = [entry["profiling_name"] for entry in trace["entries"]]
    assert {"gloo:all_reduce", "gloo:all_gather", "gloo:reduce_scatter"} <= {*names}


def test_a_planted_mismatch(cluster: Cluster, tmp_path: Path) -> None:
    cluster.execute(CALLS)
    with pytest.raises(CellError, match="CollectiveMismatch"):
        cluster.execute("nbdist.all_reduce(torch.ones(4 if rank != 2 else 5))")
    history = cluster.collectives()
    history.save(tmp_path)
    assert history.parted is not None
    text = analyzed(tmp_path)
    errors = f"Collective sequence number: {history.parted.sequence} has errors"
    assert text.count("has errors") == text.count(errors) == 1
    assert "Culprit rank 2; Error type: SIZE_OR_SYNTAX_MISMATCH" in text
    assert "'[[4]]' does not match found input sizes: '[[5]]'" in text
    assert "In[" in text


def test_a_rank_that_died(cluster: Cluster, tmp_path: Path) -> None:
    cluster.execute("nbdist.all_reduce(torch.ones(4))")
    pid = cluster.infos[1].pid
    stop(pid)
    cell = cluster.execute("nbdist.all_reduce(torch.ones(6))", wait=False)
    wait_until(lambda: len(cluster.collectives().rows[-1].calls) == 2, DEADLINE_S)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CellError):
        cell.result(DEADLINE_S)  # type: ignore[union-attr]
    history = cluster.collectives()
    history.save(tmp_path)
    assert history.parted is not None
    assert history.parted.missing == (1,)
    text = analyzed(tmp_path)
    assert (
        "Not all ranks joining collective, sequence number: "
        f"{history.parted.sequence}" in text
    )
    assert "missing ranks: {1}" in text


def test_a_folder_with_files_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.execute("nbdist.barrier()")
    (tmp_path / "notes").touch()
    with pytest.raises(UsageError, match="is not an empty folder"):
        cluster.collectives().save(tmp_path)
