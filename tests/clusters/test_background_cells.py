"""Cells in the background: `Cluster.execute(..., wait=False)`."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import CancelledError

import pytest

from nbdist import CellError, Cluster
from nbdist.errors import CellInterrupted, CellTimeout, NotRunning, UsageError
from tests.processes import wait_until

pytestmark = pytest.mark.usefixtures("patience")

DEADLINE_S = 60.0
SLEEP = "import time\ntime.sleep(600)"
PAUSE = "import time; time.sleep(600)"


def is_running(cluster: Cluster) -> bool:
    """Whether every rank runs a cell."""
    return all(state and state["what"] for state in cluster.status().values())


def others_wait_for(rank: int, code: str) -> str:
    """A cell in which one rank runs code, and the others wait for it in a barrier."""
    return f"if rank == {rank}:\n    {code}\nnbdist.barrier()"


def ends(cluster: Cluster) -> None:
    """Check that the ranks run a cell together, and that no thread is left."""
    cluster.execute("nbdist.barrier()", timeout_s=DEADLINE_S)
    wait_until(lambda: "nbdist-calls" not in names_of_threads(), DEADLINE_S)


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_the_future_has_the_cells_result(cluster: Cluster):
    future = cluster.execute("print(rank)\nx = rank", wait=False)
    result = future.result(DEADLINE_S)
    assert [each.stdout for each in result] == ["0\n", "1\n", "2\n", "3\n"]
    assert cluster["x"] == [0, 1, 2, 3]
    some = cluster.on([1, 3]).execute("print('some')", wait=False)
    assert list(some.result(DEADLINE_S).ranks) == [1, 3]
    ends(cluster)


def test_cells_run_in_their_order_and_later_calls_wait_for_them(cluster: Cluster):
    noted: list[str] = []
    cluster.on_wait = noted.append
    try:
        cluster.execute("words = []", wait=False)
        slow = "import time\ntime.sleep(1)\nwords.append('a')"
        cluster.execute(slow, number=7, wait=False)
        cluster.execute("words.append('b')", ranks=[0], number=8, wait=False)
        assert cluster["words"] == [["a", "b"], ["a"], ["a"], ["a"]]
    finally:
        cluster.on_wait = lambda _: None
    (note,) = noted
    assert "waits for In[7] and In[8], in the background" in note
    ends(cluster)


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_cell_that_fails_has_the_error_of_a_cell_in_front(
    cluster: Cluster, rank: int
):
    code = others_wait_for(rank, "raise ValueError('on purpose')")
    future = cluster.execute(code, wait=False)
    error = future.exception(DEADLINE_S)
    assert isinstance(error, CellError)
    assert f"rank {rank} of 4" in str(error)
    assert "ValueError: on purpose" in str(error)
    ends(cluster)


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_ranks_whose_calls_differ_have_a_mismatch(cluster: Cluster, rank: int):
    code = f"nbdist.all_reduce(torch.ones(3 if rank == {rank} else 4))"
    error = cluster.execute(code, wait=False).exception(DEADLINE_S)
    assert isinstance(error, CellError)
    assert "CollectiveMismatch" in str(error)
    ends(cluster)


DDP = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
loss = model(torch.ones(1, 2)).sum()
if rank == 1:
    import time; time.sleep(600)
loss.backward()
"""


@pytest.mark.parametrize(
    "code",
    [SLEEP, *(others_wait_for(rank, PAUSE) for rank in (0, 2, 3)), DDP],
    ids=["everywhere", "first", "middle", "last", "in C++"],
)
def test_an_interrupt_ends_the_cell_on_every_rank(cluster: Cluster, code: str):
    cluster.execute("kept = rank")
    future = cluster.execute(code, wait=False)
    behind = cluster.execute("kept += 1", wait=False)
    wait_until(lambda: is_running(cluster), DEADLINE_S)
    future.interrupt()
    with pytest.raises(CellInterrupted, match="all ranks keep their variables"):
        future.result(DEADLINE_S)
    behind.result(DEADLINE_S)
    assert cluster["kept"] == [1, 2, 3, 4]
    ends(cluster)


def test_an_interrupt_of_a_waiting_cell_cancels_it(cluster: Cluster):
    running = cluster.execute(SLEEP, wait=False)
    waiting = cluster.execute("never = 1", wait=False)
    wait_until(lambda: is_running(cluster), DEADLINE_S)
    assert waiting.seconds is None
    assert running.seconds is not None
    waiting.interrupt()
    with pytest.raises(CancelledError):
        waiting.result(DEADLINE_S)
    running.interrupt()
    with pytest.raises(CellInterrupted):
        running.result(DEADLINE_S)
    running.interrupt()  # has no effect on a later call
    assert cluster["'never' in globals()"] == [False] * 4
    ends(cluster)


def test_a_timeout_counts_from_the_beginning_of_the_cell(cluster: Cluster):
    cluster.execute("import time\ntime.sleep(1.5)", wait=False)
    quick = cluster.execute("import time\ntime.sleep(0.2)", timeout_s=1, wait=False)
    late = cluster.execute(SLEEP, timeout_s=0.5, wait=False)
    quick.result(DEADLINE_S)
    with pytest.raises(CellTimeout, match=r"not finished after 0\.5 s"):
        late.result(DEADLINE_S)
    ends(cluster)


def test_an_invalid_request_raises_at_once(cluster: Cluster):
    with pytest.raises(UsageError, match="rank 4 is not one of 0-3"):
        cluster.execute("1", [0, 4], wait=False)
    with pytest.raises(UsageError, match="above 0"):
        cluster.execute("1", timeout_s=0, wait=False)
    with pytest.raises(NotRunning):
        Cluster(1, device="cpu").execute("1", wait=False)


def test_the_ranks_answer_about_their_state_meanwhile(cluster: Cluster):
    future = cluster.execute(f"level = 3\n{SLEEP}", number=12, wait=False)
    wait_until(lambda: is_running(cluster), DEADLINE_S)
    states = cluster.status()
    assert [state and state["what"] for state in states.values()] == ["In[12]"] * 4
    assert all("time.sleep(600)" in (s or "") for s in cluster.stacks().values())
    names = [{v.name for v in vs} for vs in cluster.variables("lev*").values()]
    assert names == [{"level"}] * 4
    assert "level" in cluster.complete("lev", "lev", 3)
    assert not future.done()
    future.interrupt()
    assert isinstance(future.exception(DEADLINE_S), CellInterrupted)
    ends(cluster)


def test_the_wait_for_a_cell_in_the_background_can_be_interrupted(cluster: Cluster):
    future = cluster.execute(SLEEP, number=3, wait=False)
    cluster.on_wait = lambda _: os.kill(os.getpid(), signal.SIGINT)
    try:
        with pytest.raises(CellInterrupted, match=r"wait for In\[3\] was interrupted"):
            cluster.execute("never = 1")
    finally:
        cluster.on_wait = lambda _: None
    assert not future.done()
    future.interrupt()
    assert isinstance(future.exception(DEADLINE_S), CellInterrupted)
    assert cluster["'never' in globals()"] == [False] * 4
    ends(cluster)


# -- clusters that a test damages ------------------------------------------------------


def kill(cluster: Cluster, rank: int) -> None:
    os.kill(cluster.ranks[rank].pid, signal.SIGKILL)


def test_a_rank_that_dies_ends_the_cell_and_is_replaced():
    with Cluster(3, device="cpu") as cluster:
        for rank in (0, 1, 2):
            future = cluster.execute(others_wait_for(rank, PAUSE), wait=False)
            wait_until(lambda: is_running(cluster), DEADLINE_S)
            kill(cluster, rank)
            error = future.exception(DEADLINE_S)
            assert isinstance(error, CellError)
            assert f"rank {rank} (pid" in str(error)
            assert "SIGKILL" in str(error)
            assert f"rank {rank} was replaced" in error.note
            ends(cluster)
        future = cluster.execute(others_wait_for(1, PAUSE), wait=False)
        wait_until(lambda: is_running(cluster), DEADLINE_S)
        cluster.replace([1])
        error = future.exception(DEADLINE_S)
        assert isinstance(error, CellError)
        assert "rank 1" in str(error)
        assert "was ended, as requested" in str(error)
        ends(cluster)


def test_a_stop_ends_the_running_cell_and_cancels_the_others():
    cluster = Cluster(3, device="cpu").start()
    try:
        for rank, end in enumerate([cluster.restart, cluster.restart, cluster.stop]):
            running = cluster.execute(others_wait_for(rank, PAUSE), wait=False)
            waiting = cluster.execute("1", wait=False)
            wait_until(lambda: is_running(cluster), DEADLINE_S)
            end()
            error = running.exception(DEADLINE_S)
            assert isinstance(error, NotRunning)
            assert str(error) == "the cluster was stopped before this had ended"
            assert waiting.cancelled()
            if cluster.running:
                ends(cluster)
    finally:
        cluster.stop()
    wait_until(lambda: "nbdist-calls" not in names_of_threads(), DEADLINE_S)


ELASTIC = """
import time
@nbdist.elastic.run
def train(state):
    while state.steps < 10_000:
        time.sleep(0.05)
        state.steps += 1
        state.commit()
state = nbdist.elastic.State(steps=0)
train(state)
"""


def test_an_elastic_run_in_the_background_changes_its_size_and_is_interrupted():
    with Cluster(2, device="cpu") as cluster:
        future = cluster.execute(ELASTIC, wait=False)
        wait_until(lambda: bool(elastic_ranks(cluster)), DEADLINE_S)
        assert "3 ranks" in cluster.scale(3)
        assert cluster.size == 3
        assert not future.done()
        before = [info.pid for info in cluster.ranks]
        kill(cluster, 2)
        wait_until(lambda: has_new_rank(cluster, before), DEADLINE_S)
        future.interrupt()
        assert isinstance(future.exception(DEADLINE_S), CellInterrupted)
        ends(cluster)


def elastic_ranks(cluster: Cluster) -> dict[int, object]:
    assert cluster._elastic is not None
    followed = list(cluster._elastic._followed)
    return dict(followed[0].elastic) if followed else {}


def has_new_rank(cluster: Cluster, pids: list[int]) -> bool:
    now = [info.pid for info in cluster.ranks]
    return now[:2] == pids[:2] and now[2:] != pids[2:] and len(now) == 3
