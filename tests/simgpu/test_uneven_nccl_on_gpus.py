"""Ranks that leave out a collective of NCCL, or call another one than the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nbdist import CellError, Cluster
from nbdist.errors import NcclMismatch
from tests.gpu_marks import needs_gpus, simulated

N = 2
SUM = "all_reduce(Float, 3 elements, sum)"
SUM_OF_5 = "all_reduce(Float, 5 elements, sum)"
MAX = "all_reduce(Float, 3 elements, max)"
FROM_0, FROM_1 = (f"broadcast(Float, 3 elements, root {root})" for root in range(2))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(2),
    pytest.mark.timeout(200),
    needs_gpus(N),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(N, device="cuda", threads=1) as running:
        yield running


def released(cluster: Cluster, code: str, ranks: list[int] | None = None) -> str:
    """The error of a cell in which rank 0 waits."""
    cluster.execute("x = torch.ones(3, device=device)\ndist.all_reduce(x)\nx.tolist()")
    before = [info.pid for info in cluster.ranks]
    with pytest.raises(CellError) as ended:
        cluster.execute(code, ranks, timeout_s=60)
    assert [failure.rank for failure in ended.value.result.failures] == [0]
    assert [info.pid for info in cluster.ranks] == before
    cluster.execute(
        "y = torch.full((3,), rank + 1.0, device=device)\n"
        "dist.all_reduce(y)\n"
        "assert y.tolist() == [3.0] * 3",
        timeout_s=60,
    )
    return str(ended.value)


@pytest.mark.parametrize(
    "call",
    [
        "dist.all_reduce(x); x.tolist()",
        "dist.all_reduce(x, async_op=True); torch.cuda.synchronize()",
        "dist.all_reduce(x, async_op=True).wait(); print(x.sum().item())",
    ],
)
def test_the_rank_that_waits_is_released(cluster: Cluster, call: str) -> None:
    said = released(
        cluster,
        f"if rank == 0:\n    {call}\n    went_on = True",
    )
    assert "released from allreduce by NCCL, at In[" in said, said
    assert "line 2: the cell of rank 1 has ended" in said, said
    assert cluster["'went_on' in globals()"] == [False, False]


@simulated
@pytest.mark.parametrize(
    ("first", "second", "kinds"),
    [
        (
            "dist.all_reduce(x)", "dist.broadcast(x, 0)",
            (SUM, FROM_0),
        ),
        (
            "dist.all_reduce(x)", "dist.all_reduce(x, dist.ReduceOp.MAX)",
            (SUM, MAX),
        ),
        (
            "dist.broadcast(x, 0)", "dist.broadcast(x, 1)",
            (FROM_0, FROM_1),
        ),
        (
            "dist.gather(x, parts, dst=0)", "dist.gather(x, parts, dst=1)",
            ("gather(root 0)", "gather(root 1)"),
        ),
        (
            "dist.all_reduce(x); dist.all_reduce(y)", "dist.all_reduce(y); y *= 2; "
            "dist.all_reduce(y)",
            (SUM, SUM_OF_5),
        ),
        (
            "dist.all_gather(parts, x)", "dist.gather(x, dst=0)",
            ("all_gather", "gather(root 0)"),
        ),
    ],
)  # fmt: skip
def test_ranks_that_call_different_collectives_are_released(
    cluster: Cluster, first: str, second: str, kinds: tuple[str, str]
) -> None:
    cluster.execute(
        "x = torch.ones(3, device=device)\n"
        "y = torch.ones(5, device=device)\n"
        "parts = [torch.empty_like(x) for _ in range(2)]\n"
        "dist.all_reduce(x)\nx.tolist()"
    )
    with pytest.raises(CellError) as ended:
        cluster.execute(
            f"if rank == 0:\n    {first}\nelse:\n    {second}\n"
            "torch.cuda.synchronize()\nwent_on = True",
            timeout_s=60,
        )
    said = "\n".join(failure.evalue for failure in ended.value.result.failures)
    assert [failure.rank for failure in ended.value.result.failures] == [0, 1]
    assert f"rank 0 called {kinds[0]}; rank 1 called {kinds[1]}" in said, said
    assert "line 5: the ranks parted at collective #" in said, said
    assert cluster["'went_on' in globals()"] == [False, False]
    cluster.execute(
        "y = torch.full((3,), rank + 1.0, device=device)\n"
        "dist.all_reduce(y)\n"
        "assert y.tolist() == [3.0] * 3",
        timeout_s=60,
    )


@simulated
def test_a_rank_that_called_another_collective_and_ended_is_named(
    cluster: Cluster,
) -> None:
    said = released(
        cluster,
        "if rank == 0:\n    dist.all_reduce(x); x.tolist()\n"
        "else:\n    dist.broadcast(x, 0)",
    )
    assert f"rank 0 called {SUM}" in said, said
    assert f"rank 1 called {FROM_0}" in said, said


@pytest.fixture
def mixing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster whose NCCL completes reductions with different reduce-ops."""
    monkeypatch.setenv("SIMGPU_NCCL_MIXES_OPS", "1")
    with Cluster(N, device="cuda", threads=1) as running:
        yield running


@simulated
def test_different_reductions_that_have_completed_are_an_error(mixing: Cluster) -> None:
    train = "x = torch.full((3,), rank + 1.0, device=device)\ndist.all_reduce(x)\n"
    mixing.execute(train)
    mixing.execute("dist.all_reduce(x)", [0])
    mixing.execute("dist.all_reduce(x)", [1])  # in turn, and the same
    before = [info.pid for info in mixing.ranks]
    differing = "op = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM\n"
    with pytest.raises(NcclMismatch) as ended:
        mixing.execute(
            f"{train}{differing}dist.all_reduce(x, op)\ny = x.tolist()\n{train}"
        )
    said = str(ended.value)
    assert "at collective #4 of the group" in said, said
    assert f"rank 0 called {SUM}" in said, said
    assert f"rank 1 called {MAX}" in said, said
    assert not ended.value.result.failures
    assert mixing["y"] == [[6.0] * 3, [3.0] * 3], "the ranks keep what they computed"
    mixing.execute(f"{train}assert x.tolist() == [3.0] * 3")
    assert [info.pid for info in mixing.ranks] == before
    with pytest.raises(NcclMismatch):
        mixing.run(all_reduce_by_own_op)
    mixing.execute(f"{train}assert x.tolist() == [3.0] * 3")


def all_reduce_by_own_op() -> None:
    import torch.distributed as dist

    op = dist.ReduceOp.MIN if dist.get_rank() else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(3, device="cuda"), op)


def test_a_rank_that_was_not_asked_is_named(cluster: Cluster) -> None:
    said = released(cluster, "dist.all_reduce(x); x.tolist()", [0])
    assert "rank 1 was not asked to run it" in said, said


def test_a_backward_that_waits_is_released(cluster: Cluster) -> None:
    said = released(
        cluster,
        "from torch.nn.parallel import DistributedDataParallel\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 4))\n"
        "model = DistributedDataParallel(net.to(device))\n"
        "out = model(torch.ones(2, 4, device=device)).sum()\n"
        "if rank == 0:\n"
        "    out.backward()\n"
        "    torch.cuda.synchronize()",
    )
    assert "the cell of rank 1 has ended" in said, said


def test_a_script_that_waits_is_released(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "x = torch.ones(3, device='cuda')\n"
        "if dist.get_rank() == 0:\n"
        "    dist.all_reduce(x)\n"
        "    torch.cuda.synchronize()\n"
    )
    with pytest.raises(CellError, match=r"train\.py line 6: the cell of rank 1 has"):
        cluster.run_script(script, timeout_s=60)


LATE = """
import time
from datetime import timedelta
from pathlib import Path
group = dist.new_group(timeout=timedelta(seconds=2))
x = torch.ones(3, device=device)
dist.all_reduce(x, group=group)
x.tolist()
if rank == 0:
    try:
        dist.all_reduce(x, group=group)
        x.tolist()
    finally:
        Path({marker!r}).touch()
else:
    since = time.monotonic()
    while not Path({marker!r}).exists() and time.monotonic() < since + 30:
        time.sleep(0.05)
    dist.all_reduce(x, group=group)
    x.tolist()
    went_on = True
"""


def test_a_time_out_of_nccl_is_an_error_of_the_rank_that_waits(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The other rank, which is busy, comes too late."""
    before = [info.pid for info in cluster.ranks]
    with pytest.raises(CellError) as ended:
        cluster.execute(LATE.format(marker=str(tmp_path / "ended")), timeout_s=60)
    first, second = ended.value.result.failures
    assert (first.rank, first.ename) == (0, "CollectiveTimeout"), str(ended.value)
    assert "its time-out of 2 s has passed, and rank 1 has not called" in first.evalue
    assert "line 12: " in first.evalue, first.evalue
    assert second.rank == 1
    assert "ommunicator was aborted" in second.evalue or "released" in second.evalue
    assert cluster["'went_on' in globals()"] == [False, False]
    train = "y = torch.ones(3, device=device)\ndist.all_reduce(y)\n"
    cluster.execute(f"{train}assert y.tolist() == [2.0] * 3", timeout_s=60)
    assert [info.pid for info in cluster.ranks] == before


def test_calls_that_ranks_make_in_turn_complete(cluster: Cluster) -> None:
    """Rank 0 is not waiting: it computes, or its cell has ended."""
    cluster.execute("dist.all_reduce(torch.ones(3, device=device))")  # NCCL connects
    cluster.execute("x = torch.full((3,), rank + 1.0, device=device)")
    cluster.execute("dist.all_reduce(x)", [0])
    cluster.execute("dist.all_reduce(x)", [1])
    cluster.execute("assert x.tolist() == [3.0] * 3", timeout_s=60)
    cluster.execute(
        "import time\n"
        "if rank == 0:\n"
        "    for _ in range(50): time.sleep(0.1); x.sum().item()",
        timeout_s=60,
    )
