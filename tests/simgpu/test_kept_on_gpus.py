"""A kept cluster whose ranks have a GPU each, and use NCCL."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbdist
from nbdist import CellError, KeptCluster
from nbdist.clusters.kept.clusters import stop_cluster
from nbdist.errors import NcclMismatch, NotRunning
from tests.gpu_marks import needs_gpus, simulated
from tests.processes import wait_until

N = 2
DEADLINE_S = 60.0
SUM = "x = torch.full((3,), rank + 1.0, device=device)\ndist.all_reduce(x)\n"
LOOP = """
import os
mine = torch.arange(4.0, device=device) + rank
total, is_over = torch.zeros(3, device=device), torch.zeros(1, device=device)
while not is_over.item():
    part = torch.ones(3, device=device)
    dist.all_reduce(part)
    total += part
    is_over.fill_(float(os.path.exists(over)))
    dist.all_reduce(is_over)
    if rank == 0: open(over + " begun", "w").close()
assert total.eq(total[0]).all() and total[0] >= 2
print("trained on", total.device)
"""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(2),
    pytest.mark.timeout(300),
    needs_gpus(N),
]


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster whose NCCL completes reductions with different reduce-ops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        patch.setenv("SIMGPU_NCCL_MIXES_OPS", "1")
        KeptCluster(N, device="cuda", name="gpus", threads=1).start().detach()
        yield "gpus"
        with contextlib.suppress(NotRunning):
            stop_cluster("gpus")


@pytest.fixture
def kept(name: str) -> Iterator[KeptCluster]:
    cluster = nbdist.attach(name)
    yield cluster
    cluster.detach()


def assert_works(cluster: KeptCluster) -> None:
    cluster.execute(f"{SUM}assert x.tolist() == [3.0] * 3", timeout_s=DEADLINE_S)


def test_a_training_goes_on_when_its_notebook_is_killed(
    name: str, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    code = f"import nbdist\nover, loop = {str(over)!r}, {LOOP!r}\n"
    code += f"cluster = nbdist.attach({name!r})\ncluster.push(over=over)\n"
    notebook = subprocess.Popen([sys.executable, "-c", f"{code}cluster.execute(loop)"])
    wait_until(Path(f"{over} begun").exists, DEADLINE_S)
    notebook.kill()
    notebook.wait()
    again = nbdist.attach(name)
    (cell,) = again.unseen_cells
    over.touch()
    result = again.follow(cell)
    assert [result[rank].stdout for rank in range(N)] == [
        f"trained on cuda:{rank}\n" for rank in range(N)
    ]
    assert [mine.tolist() for mine in again.pull("mine.cpu()")] == [
        [0.0, 1.0, 2.0, 3.0],
        [1.0, 2.0, 3.0, 4.0],
    ]
    assert_works(again)
    again.detach()


def test_a_rank_that_waits_for_an_idle_one_is_released(kept: KeptCluster) -> None:
    assert_works(kept)
    with pytest.raises(CellError, match="the cell of rank 1 has ended"):
        kept.execute("if rank == 0:\n    dist.all_reduce(x); x.tolist()")
    assert_works(kept)


@simulated
def test_different_reductions_that_have_completed_are_an_error(
    kept: KeptCluster,
) -> None:
    assert_works(kept)
    differing = "op = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM\n"
    with pytest.raises(NcclMismatch, match=r"rank 1 called all_reduce\(.*max\)"):
        kept.execute(f"{differing}dist.all_reduce(x, op)\nx.tolist()")
    assert_works(kept)


def test_a_rank_that_dies_while_nobody_is_attached_is_replaced(name: str) -> None:
    kept = nbdist.attach(name)
    kept.execute("mine = torch.full((2,), 5.0, device=device)")
    pid = kept.infos[1].pid
    kept.detach()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: nbdist.kept_clusters()[0].died == (1,), DEADLINE_S)
    again = nbdist.attach(name)
    assert_works(again)
    assert again.infos[1].pid != pid
    assert again.pull("mine.tolist()", ranks=[0]) == [[5.0, 5.0]]
    again.detach()
