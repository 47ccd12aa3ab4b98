"""`cluster.collectives` on real ranks, which wait, disagree, are stopped or killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nbdist import CellError, Cluster
from nbdist.clusters.futures import CallFuture
from nbdist.clusters.result import CellResult
from nbdist.errors import NotRunning, UsageError
from nbdist.ipc.private_files import memory_folder
from tests.processes import stop, wait_until

DEADLINE_S = 30.0
LATE = """import time
for _ in range(3):
    nbdist.all_reduce(torch.ones(4))
if rank == {rank}:
    time.sleep(600)
nbdist.all_reduce(torch.ones(6))"""
SITE = "In[31] line 6"


@pytest.fixture(scope="module")
def lasting() -> Iterator[Cluster]:
    with Cluster(n=3, device="cpu", threads=1) as running:
        yield running


def is_awaited(cluster: Cluster, rank: int) -> bool:
    """Whether all other ranks wait in the last call for this one, and know where."""
    rows = cluster.collectives().rows
    if not rows or rows[-1].missing != (rank,):
        return False
    calls = rows[-1].calls.values()
    return len(calls) == cluster.size - 1 and all(call.line for call in calls)


@contextmanager
def waiting_for(cluster: Cluster, rank: int) -> Iterator[CallFuture[CellResult]]:
    """Run a cell in which all other ranks wait for this one."""
    cell = cluster.execute(LATE.format(rank=rank), number=31, wait=False)
    assert isinstance(cell, CallFuture)
    try:
        wait_until(lambda: is_awaited(cluster, rank), DEADLINE_S)
        yield cell
    finally:
        if not cell.done():
            cluster.interrupt()


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_is_killed_before_it_has_come(lasting: Cluster, rank: int) -> None:
    cluster = lasting
    with waiting_for(cluster, rank) as cell:
        waiting = cluster.collectives()
        assert waiting.summary.startswith(
            f"the ranks parted at all_reduce #{waiting.rows[-1].sequence} ({SITE}): "
            f"rank {rank} has not come (its last call is all_reduce #"
        )
        os.kill(cluster.infos[rank].pid, signal.SIGKILL)
        with pytest.raises(CellError):
            cell.result(DEADLINE_S)
    parted = cluster.collectives().parted
    assert parted is not None
    assert parted.missing == (rank,)
    assert {call.state for call in parted.calls.values()} == {"failed"}
    assert parted.location == SITE
    summary = cluster.collectives().summary
    assert f"rank {rank} died and had not come (its last call is all_red" in summary
    cluster.execute("nbdist.all_reduce(torch.ones(7))")
    last = cluster.collectives().rows[-1]  # the new rank's record has begun
    assert set(last.calls) == {0, 1, 2}
    assert (last.generation, last.kinds) == (
        parted.generation + 1,
        {"all_reduce(sum, float32, (7,))": [0, 1, 2]},
    )


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_is_killed_in_a_call(lasting: Cluster, rank: int) -> None:
    cluster = lasting
    late = (rank + 1) % 3
    with waiting_for(cluster, late) as cell:
        os.kill(cluster.infos[rank].pid, signal.SIGKILL)
        wait_until(lambda: rank in cluster.died(), DEADLINE_S)
        cluster.interrupt()
        with pytest.raises(CellError):
            cell.result(DEADLINE_S)
    parted = cluster.collectives().parted
    assert parted is not None
    assert (parted.missing, parted.ended) == ((late,), (rank,))
    assert f"rank {rank} died in it" in cluster.collectives().summary


def test_records_of_processes_that_are_long_dead_are_removed(lasting: Cluster) -> None:
    """After two more deaths at most the last one's record is left."""
    for _ in range(2):
        os.kill(lasting.infos[1].pid, signal.SIGKILL)
        wait_until(lasting.died, DEADLINE_S)
        lasting.repair()
    folder = memory_folder(lasting._live().run_dir)
    assert len(list(folder.glob("*.flight"))) == 4


def test_a_rank_with_another_shape(cluster: Cluster) -> None:
    with pytest.raises(CellError, match="CollectiveMismatch"):
        cluster.execute(
            "nbdist.all_reduce(torch.ones(4 if rank != 1 else 5))", number=9
        )
    history = cluster.collectives()
    assert history.parted is not None
    assert history.summary == (
        f"the ranks parted at call #{history.parted.sequence}: ranks 0,2-3 called "
        "all_reduce(sum, float32, (4,)) at In[9] line 1; rank 1 called all_reduce(sum, "
        "float32, (5,)) at In[9] line 1"
    )
    cluster.execute("nbdist.all_reduce(torch.ones(4))")
    assert cluster.collectives().parted is None


def test_a_stopped_rank(cluster: Cluster) -> None:
    """Its record is read, although the process answers nothing."""
    pid = cluster.infos[2].pid
    stop(pid)
    try:
        cell = cluster.execute("nbdist.all_reduce(torch.ones(4))", wait=False)
        wait_until(lambda: is_awaited(cluster, 2), DEADLINE_S)
        assert "rank 2 has not come" in cluster.collectives().summary
    finally:
        os.kill(pid, signal.SIGCONT)
    cell.result(DEADLINE_S)
    assert cluster.collectives().parted is None


def test_every_way_to_make_a_call_is_recorded(cluster: Cluster) -> None:
    cluster.execute(
        "import nbdist.horovod as hvd\n"
        "hvd.init()\n"
        "nbdist.all_reduce(torch.ones(22))\n"
        "nbdist.all_reduce(torch.ones(23), async_op=True).wait()\n"
        "dist.broadcast(torch.ones(24), 1)\n"
        "hvd.allreduce(torch.ones(25))\n"
        "group = dist.new_group([0, 3])\n"
        "if rank in (0, 3):\n"
        "    dist.all_reduce(torch.ones(26), group=group)\n"
        "    move = dist.recv if rank else dist.send\n"
        "    move(torch.ones(27), 3 - rank)\n"
        "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(28, 1))\n"
        "net(torch.ones(1, 28)).sum().backward()\n",
        number=5,
    )
    # The sizes are those of no other test: the history has all calls of the cluster.
    history = cluster.collectives(count=1000)
    made = {kind: row for row in history.rows for kind in row.kinds}
    for kind in (
        "all_reduce(sum, float32, (22,))",
        "all_reduce(sum, float32, (23,))",
        "broadcast(root=1, float32, (24,))",
        "all_reduce(sum, float32, (26,))",
        "all_reduce(sum, float32, (29,))",
        "send(to=3, float32, (27,))",
    ):
        row = made[kind]
        assert {call.state for call in row.calls.values()} == {"done"}
        assert tuple(sorted(row.calls)) == row.members
    assert made["all_reduce(sum, float32, (26,))"].members == (0, 3)
    assert made["send(to=3, float32, (27,))"].members == (0, 3)
    assert made["all_reduce(sum, float32, (23,))"].location == "In[5] line 4"
    assert any(kind.endswith("float32, (25,))") for kind in made)
    assert history.parted is None
    shown = cluster.collectives([0, 3], count=2).table
    assert "rank 3" in repr(shown)
    assert "rank 1" not in repr(shown)


def test_groups_without_a_common_rank_have_rows_of_their_own(cluster: Cluster) -> None:
    cluster.execute(
        "pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]\n"
        "for size in (11, 12) if rank < 2 else (13, 14):\n"
        "    dist.all_reduce(torch.ones(size), group=pairs[rank // 2])\n",
        number=5,
    )
    history = cluster.collectives()
    assert history.parted is None
    kinds = {kind: row.members for row in history.rows for kind in row.kinds}
    for size, members in ((11, (0, 1)), (12, (0, 1)), (13, (2, 3)), (14, (2, 3))):
        assert kinds[f"all_reduce(sum, float32, ({size},))"] == members


def test_more_than_a_thousand_calls(cluster: Cluster) -> None:
    cluster.execute(
        "x = torch.ones(4)\nfor _ in range(1500):\n    nbdist.all_reduce(x)"
    )
    rows = cluster.collectives().rows
    rows = [row for row in rows if row.group == rows[-1].group]  # earlier tests' groups
    numbers = [row.sequence for row in rows]
    assert numbers == list(range(numbers[-1] - 999, numbers[-1] + 1))
    assert all(len(row.calls) == 4 for row in rows)


def test_a_call_on_a_closed_group_is_not_recorded(cluster: Cluster) -> None:
    with pytest.raises(CellError, match="was closed"):
        cluster.execute(
            "import nbdist.collectives as nc\n"
            "group = nc.default_group().new(range(world_size))\n"
            "group.close()\n"
            "nc.all_reduce(torch.ones(99), group=group, async_op=True).wait()\n"
        )
    kinds = [kind for row in cluster.collectives().rows for kind in row.kinds]
    assert "all_reduce(sum, float32, (99,))" not in kinds


def test_invalid_arguments(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match="-n 0: expected a number of calls"):
        cluster.collectives(count=0)
    with pytest.raises(UsageError, match="rank 4"):
        cluster.collectives([4])


def test_nothing_is_left_after_the_end() -> None:
    cluster = Cluster(n=2, device="cpu")
    with pytest.raises(NotRunning):
        cluster.collectives()
    with cluster:
        cluster.execute("nbdist.all_reduce(torch.ones(4))")
        folder = memory_folder(cluster._live().run_dir)
        assert folder.parent == Path("/dev/shm")
        assert len(list(folder.glob("*.flight"))) == 2
    assert not folder.exists()
