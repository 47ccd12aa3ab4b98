"""An elastic run that cannot continue raises, and its ranks work afterwards."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_training import STEPS, TRAIN, prepare

from nbdist.clusters import membership
from nbdist.clusters.cluster import Cluster
from nbdist.clusters.recovery import Recovery
from nbdist.errors import CellError, CellInterrupted, CellTimeout, UsageError
from tests.clusters.test_slow_values import SLOW, pressed_when
from tests.processes import wait_until

SUM = "x = torch.ones(2); nbdist.all_reduce(x); assert x.eq(world_size).all()"


@pytest.fixture(scope="module")
def _limited_cluster() -> Iterator[Cluster]:
    with Cluster(n=3, device="cpu", threads=1) as running:
        yield running


@pytest.fixture
def cluster(_limited_cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """Three ranks with the training defined, which must work after each test."""
    _limited_cluster.scale(3, drop=True)
    _limited_cluster.on_note = lambda _note: None
    prepare(_limited_cluster, tmp_path)
    yield _limited_cluster
    _limited_cluster.execute(SUM, timeout_s=30)


def test_a_collective_before_the_run_ends_a_newcomers_cell(cluster: Cluster) -> None:
    cluster.execute("if rank == 2: events = [(3, 'forward', die)]")
    with pytest.raises(CellError, match="different collectives") as caught:
        cluster.execute("nbdist.barrier()\n" + TRAIN, timeout_s=60)
    table = "\n".join(caught.value.rendered)
    assert "barrier" in table
    assert "elastic_meeting" in table


def test_a_setup_cell_with_a_collective_does_not_block_a_newcomer(
    cluster: Cluster,
) -> None:
    notes: list[str] = []
    cluster.on_note = notes.append
    cluster.execute("nbdist.barrier(); early = 1", setup=True)
    try:
        cluster.execute("if rank == 1: events = [(3, 'forward', die)]")
        cluster.execute(TRAIN, timeout_s=60)
    finally:
        cluster._setup.clear()
    assert "setup cell" in notes[0]
    assert "released from barrier: a setup cell runs only on the rank" in notes[0]


def test_an_elastic_run_on_some_ranks_is_refused(cluster: Cluster) -> None:
    with pytest.raises(CellError, match="needs every rank: rank 1 takes no part"):
        cluster.execute(TRAIN, [0, 2], timeout_s=30)


def test_some_ranks_are_released_from_a_collective_of_all_ranks(
    cluster: Cluster,
) -> None:
    with pytest.raises(CellError, match="rank 1-2 was not asked to run it"):
        cluster.execute("nbdist.barrier()", [0], timeout_s=30)


def test_a_state_with_ddp_is_refused_before_anything_is_sent(cluster: Cluster) -> None:
    cell = "train(nbdist.elastic.State(model=DDP(torch.nn.Linear(2, 2))))"
    with pytest.raises(CellError, match=r"call DDP\(state.model\) in steps"):
        cluster.execute(cell, timeout_s=30)


def test_different_states_are_refused(cluster: Cluster) -> None:
    cell = "train(nbdist.elastic.State(**({'a': 1} if rank else {'b': 1})))"
    with pytest.raises(CellError, match="rank 0 called steps with a State of b"):
        cluster.execute(cell, timeout_s=30)


def test_a_newcomer_skips_the_runs_that_have_ended(cluster: Cluster) -> None:
    cluster.execute("first = nbdist.elastic.run(lambda state: state.step)")
    cluster.execute("if rank == 0: events = [(3, 'forward', die)]")
    cluster.execute(
        "other = nbdist.elastic.State(step=5); before = first(other)\n" + TRAIN,
        timeout_s=60,
    )
    assert cluster["before"] == [None, 5, 5]
    assert cluster["result"] == [STEPS] * 3


def test_a_newcomer_knows_what_to_join_before_its_cell_begins(
    cluster: Cluster,
) -> None:
    """The run to join and the cell come on two channels, of which one may be slow."""
    cluster.execute(
        "import time\n"
        "import nbdist.engine.elastic as _elastic\n"
        "_expect = _elastic.expect\n"
        "_elastic.expect = lambda call: (time.sleep(1), _expect(call))[1]",
        setup=True,
    )
    try:
        test_a_newcomer_skips_the_runs_that_have_ended(cluster)
    finally:
        cluster._setup.clear()
        cluster.execute("_elastic.expect = _expect")


def test_two_ranks_that_die_at_once_are_replaced(cluster: Cluster) -> None:
    cluster.execute("if rank > 0: events = [(5, 'commit', die)]")
    # An event happens once, by its name: each rank that dies needs another name.
    cluster.execute("die.__name__ = f'die{rank}'")
    cluster.execute(TRAIN, timeout_s=60)
    assert cluster["result"] == [STEPS] * 3


def test_a_resize_beyond_the_limits_is_refused_at_once(cluster: Cluster) -> None:
    cluster.execute("train = nbdist.elastic.run(min_ranks=2, max_ranks=3)(steps)")
    cluster.execute(
        "def wait():\n    open(folder + '/there', 'w').close()\n"
        "    while not os.path.exists(folder + '/on'): time.sleep(0.001)\n"
        "events = [(4, 'forward', wait)]"
    )
    folder = Path(cluster["folder"][0])
    refused: list[str] = []

    def ask() -> None:
        wait_until((folder / "there").exists, 60)
        for size in (4, 1):
            try:
                cluster.scale(size, drop=True)
            except UsageError as error:
                refused.append(str(error))
        (folder / "on").touch()

    other = threading.Thread(target=ask)
    other.start()
    cluster.execute(TRAIN, timeout_s=30)
    other.join(10)
    assert refused == ["-n 4: steps has max_ranks=3", "-n 1: steps has min_ranks=2"]


@pytest.mark.parametrize(
    ("moment", "grace_s"), [("_meet", 30), ("_meet", 0), ("_bring_up_to_date", 30)]
)
def test_an_interrupt_during_a_recovery_is_delivered_after_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, moment: str, grace_s: float
) -> None:
    """Jupyter's button sends SIGINT to the process that waits for the cell.

    Without a grace the change is cancelled, also on ranks that have not begun it.
    """
    monkeypatch.setattr(membership, "INTERRUPT_GRACE_S", grace_s)
    before = [info.pid for info in cluster.ranks]
    begin = getattr(Recovery, moment)
    pressed = []

    def press_and_begin(*args: object) -> list[str]:
        if not pressed:
            pressed.append(moment)
            os.kill(os.getpid(), signal.SIGINT)
        return begin(*args)

    monkeypatch.setattr(Recovery, moment, press_and_begin)
    cluster.execute("if rank == 1: events = [(5, 'forward', die)]")
    notes: list[str] = []
    cluster.on_note = notes.append
    with pytest.raises(CellInterrupted, match="the surviving ranks keep") as error:
        cluster.execute(TRAIN, timeout_s=60)
    assert "rank 1 was replaced" in "\n".join([*notes, error.value.note])
    assert pressed
    after = [info.pid for info in cluster.ranks]
    assert [r for r in range(3) if after[r] != before[r]] == [1]


def with_a_slow_variable(cluster: Cluster, where: str, folder: Path) -> Path:
    """Have rank 2 die in a training, and the copy to its replacement take a minute.

    Returns:
        The file that appears once the copy has begun.
    """
    rank = 0 if where == "pickling" else 2
    cluster.execute(
        f"{SLOW}\n"
        f"slow = Slow({where!r}, ({rank},), {str(folder)!r})\n"
        "import nbdist.engine.calls as calls\n"
        "calls.VARIABLE_LIMIT_S = calls.TOTAL_LIMIT_S = 50.0\n"
        "if rank == 2: events = [(3, 'forward', die)]"
    )
    return folder / f"{where}-{rank}"


@pytest.fixture
def usual_limits(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.execute(
        "import nbdist.engine.calls as calls\n"
        "calls.VARIABLE_LIMIT_S, calls.TOTAL_LIMIT_S = 5.0, 20.0"
    )


@pytest.mark.parametrize("where", ["pickling", "unpickling"])
@pytest.mark.usefixtures("usual_limits")
def test_an_interrupt_ends_the_copy_to_a_newcomer(
    cluster: Cluster, tmp_path: Path, where: str
) -> None:
    notes: list[str] = []
    cluster.on_note = notes.append
    pid = cluster.infos[2].pid
    copying = with_a_slow_variable(cluster, where, tmp_path)
    with pytest.raises(CellInterrupted), pressed_when(copying.exists):
        cluster.execute(TRAIN)
    assert notes[0].startswith(f"rank 2 (pid {pid}")
    assert f"the copy of variables was interrupted while {where} 'slow'" in notes[0]
    assert cluster.infos[2].pid != pid


@pytest.mark.usefixtures("usual_limits")
def test_a_timeout_ends_the_copy_to_a_newcomer(
    cluster: Cluster, tmp_path: Path
) -> None:
    copy_begun = with_a_slow_variable(cluster, "pickling", tmp_path)
    with pytest.raises(CellTimeout, match="not finished after 15 s"):
        cluster.execute(TRAIN, timeout_s=15)
    assert copy_begun.exists()


def test_stop_ends_the_run_and_keeps_the_commit() -> None:
    with Cluster(n=2, device="cpu", threads=1, on_failure="stop") as cluster:
        prepare(cluster, Path(os.devnull))
        cluster.execute("if rank == 1: first_time, events = id, [(5, 'forward', die)]")
        with pytest.raises(CellError, match="--on-failure is stop"):
            cluster.execute(TRAIN, timeout_s=60)
        cluster.execute("state.restore()", [0])
        assert cluster.pull("state.step", [0]) == [5]


def test_too_few_ranks_wait_for_more() -> None:
    notes: list[str] = []
    with Cluster(n=2, device="cpu", threads=1, on_failure="shrink") as cluster:
        cluster.on_note = notes.append
        prepare(cluster, Path(os.devnull))
        cluster.execute("if rank == 1: first_time, events = id, [(5, 'forward', die)]")
        limits = "min_ranks=2, timeout_s={}"
        cluster.execute(f"train = nbdist.elastic.run({limits.format(60)})(steps)")

        def grow() -> None:
            wait_until(lambda: bool(notes), 60)
            cluster.scale(2)

        other = threading.Thread(target=grow)
        other.start()
        cluster.execute(TRAIN, timeout_s=60)
        other.join(10)
        assert cluster["result"] == [STEPS] * 2
        assert "needs 2: it waits 60 s for cluster.scale" in notes[0]

        cluster.execute(f"train = nbdist.elastic.run({limits.format(0.5)})(steps)")
        cluster.execute("if rank == 1: first_time, events = id, [(5, 'forward', die)]")
        with pytest.raises(CellError, match=r"1 ranks were left for 0\.5 s"):
            cluster.execute(TRAIN, timeout_s=60)
        cluster.execute("state.restore(); assert state.step == 5")
