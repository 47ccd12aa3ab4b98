"""The notice of a cell without progress: where each rank is, and which ranks wait."""

from __future__ import annotations

import os
import re
import signal

import pytest

from nbdist import CellError, CellInterrupted, Cluster
from nbdist.clusters import stall_detector
from nbdist.clusters.observer import Quiet
from nbdist.clusters.stall_detector import Seen, describe
from nbdist.session import Session
from nbdist.wire import CollectiveCall, ProgressSnapshot
from tests.processes import stop

DEADLINE_S = 60.0


class Notices(Quiet):
    """Keeps the notices. Interrupts the cell at the first one, if requested."""

    def __init__(self, interrupt: bool) -> None:
        self.texts: list[str] = []
        self._interrupt = interrupt

    def notice(self, text: str) -> None:
        self.texts.append(text)
        if self._interrupt:
            raise KeyboardInterrupt


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_detector, "NOTICE_AFTER_S", 1.0)
    monkeypatch.setattr(stall_detector, "LOOK_S", 0.3)


RECEIVE_FIRST = """
x = torch.ones(3)
if rank < 2:
    nbdist.recv(x, src=1 - rank)
    nbdist.send(x, dst=1 - rank)
else:
    nbdist.recv(x, src=0)
"""


@pytest.mark.usefixtures("impatient")
def test_ranks_that_wait_for_each_other_are_reported_as_a_deadlock(cluster: Cluster):
    notices = Notices(interrupt=True)
    with pytest.raises(CellInterrupted):
        cluster.execute(RECEIVE_FIRST, number=7, observer=notices)
    verdict, *places = notices.texts[0].splitlines()
    assert verdict.startswith("deadlock: each rank waits for another")
    assert [place.partition(" for ")[0] for place in places] == [
        f"rank {rank}" for rank in range(4)
    ]
    assert places[0].endswith("recv((3,), float32, cpu, from=1) in In[7] line 4")
    assert places[3].endswith("recv((3,), float32, cpu, from=0) in In[7] line 7")
    assert cluster["rank"] == [0, 1, 2, 3]


@pytest.mark.usefixtures("impatient")
def test_a_slow_rank_is_named_and_waited_for(cluster: Cluster):
    notices = Notices(interrupt=False)
    code = "if rank == 2:\n    import time\n    time.sleep(3)\nnbdist.barrier()"
    assert cluster.execute(code, number=8, observer=notices).ok
    verdict, *places = notices.texts[0].splitlines()
    assert verdict == "the others wait for rank 2"
    assert "In[8] line 3" in places[2]
    assert "barrier() in In[8] line 4" in places[0]


@pytest.mark.usefixtures("impatient")
def test_the_last_position_of_a_rank_that_does_not_answer_is_shown(cluster: Cluster):
    class Looks(Notices):
        def notice(self, text: str) -> None:
            stop(pid)
            session = Session()
            session._cluster = cluster
            self.texts.append(session.stacks_text())
            os.kill(pid, signal.SIGCONT)
            raise KeyboardInterrupt

    pid, looks = cluster.ranks[2].pid, Looks(interrupt=True)
    with pytest.raises(CellInterrupted):
        cluster.execute("import time; time.sleep(60)", number=9, observer=looks)
    said = looks.texts[0].partition("rank 2:\n  ")[2]
    assert re.match(r"does not answer: .*; last seen \d s ago at In\[9\] line 1", said)


@pytest.mark.usefixtures("impatient")
def test_a_training_without_output_causes_no_notice(cluster: Cluster):
    notices = Notices(interrupt=False)
    code = (
        "import time\nend = time.monotonic() + 3\n"
        "while True:\n"
        "    x = torch.tensor(float(time.monotonic() > end))\n"
        "    nbdist.all_reduce(x)\n"
        "    if x:\n        break\n"
    )
    assert cluster.execute(code, observer=notices).ok
    assert notices.texts == []


def call(rank: int) -> CollectiveCall:
    return CollectiveCall(rank, 1, "barrier", None, None, "-", (), "none")


def on_gpu(rank: int, sequence: int = 5) -> CollectiveCall:
    return CollectiveCall(
        rank, sequence, "all_reduce", "sum", None, "float32", (3,), "cuda",
        members=(0, 1),
    )  # fmt: skip


def test_the_text_of_the_notice():
    there = Seen(ProgressSnapshot("#1 barrier()", call(0), 1), 1.0)
    silent, busy = Seen(None, 3.0), Seen(ProgressSnapshot("In[3] line 2", None, 1), 4.0)
    assert describe({0: there, 1: silent, 3: busy}, 15.0).splitlines() == [
        "the others wait for rank 1,3",
        "rank 0 for 14 s: #1 barrier()",
        "rank 1 for 12 s: does not answer",
        "rank 3 for 11 s: In[3] line 2",
    ]
    assert describe({3: busy}, 15.0).startswith("no rank waits for another")
    assert describe({0: there}, 15.0).startswith("deadlock")
    met = {rank: Seen(ProgressSnapshot("", on_gpu(rank), 1), 1.0) for rank in range(2)}
    assert "wait for their GPUs" in describe(met, 15.0)
    late = {**met, 1: Seen(ProgressSnapshot("", on_gpu(1, sequence=4), 1), 1.0)}
    assert describe(late, 15.0).startswith("deadlock")
    assert describe({0: met[0]}, 15.0).startswith("deadlock")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("failing", "code"),
    [
        (0, "nbdist.comm().recv(source=0)"),
        (2, "nbdist.comm().Barrier()"),
        (3, "nbdist.comm().allreduce(rank)"),
    ],
)
def test_ranks_in_calls_of_mpi4py_are_released_after_a_failure(
    cluster: Cluster, failing: int, code: str
):
    with pytest.raises(CellError) as failed:
        cluster.execute(
            f"kept = rank\nif rank == {failing}: raise ValueError('mine')\n{code}",
            timeout_s=DEADLINE_S,
        )
    errors = {each.rank: each for each in failed.value.result.failures}
    assert errors.pop(failing).ename == "ValueError"
    assert len(errors) == 3
    assert all(each.evalue.startswith("MPI_ERR") for each in errors.values())
    assert cluster["kept"] == [0, 1, 2, 3]
    cluster.execute("assert nbdist.comm().allreduce(rank) == 6\ndist.barrier()")


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_computes_after_a_failure_of_another_is_not_disturbed(
    cluster: Cluster,
):
    with pytest.raises(CellError) as failed:
        cluster.execute(
            "import time\nif rank == 1: raise ValueError\ntime.sleep(3)\ndone = rank",
            timeout_s=DEADLINE_S,
        )
    assert [each.rank for each in failed.value.result.failures] == [1]
    assert cluster.pull("done", [0, 2, 3]) == [0, 2, 3]
    cluster.execute("assert nbdist.comm().allreduce(rank) == 6\ndist.barrier()")


@pytest.mark.usefixtures("impatient")
def test_interrupted_receives_do_not_affect_later_receives(cluster: Cluster):
    for _ in range(3):
        with pytest.raises(CellInterrupted):
            cluster.execute(RECEIVE_FIRST, observer=Notices(interrupt=True))
    cluster.execute(
        "x = torch.full((3,), float(rank))\n"
        "if rank % 2:\n    nbdist.recv(x, src=rank - 1)\n"
        "else:\n    nbdist.send(x, dst=rank + 1)"
    )
    assert [x.tolist() for x in cluster["x"]] == [[r - r % 2] * 3 for r in range(4)]
