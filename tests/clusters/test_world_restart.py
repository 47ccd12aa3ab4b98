"""A world that is lost is restarted, and continues from its last commit."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from elastic_training import (
    SETUP,
    STEPS,
    TRAIN,
    assert_trained,
    prepare,
    weights,
)

from nbdist.clusters import membership
from nbdist.clusters.cluster import Cluster
from nbdist.clusters.recovery import Recovery
from nbdist.errors import (
    CellError,
    ChangeFailed,
    CheckpointError,
    RankDied,
    StartError,
)
from nbdist.training.elastic import checkpoint
from nbdist.training.elastic.state import State
from tests.cluster_processes import ClusterProcesses, StartingRank
from tests.processes import wait_until
from tests.seed import SEED


def open_files() -> list[str]:
    """The open files of this process, with those that were removed."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            names.append(str(descriptor.readlink()))
    return names


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    # No recovery may wait for ranks that never meet.
    monkeypatch.setattr(membership, "MEET_TIMEOUT_S", 3600.0)
    with Cluster(n=3, device="cpu", threads=1) as running:
        running.on_note = notes_of(running).append
        prepare(running, tmp_path)
        running.execute("here_before = 1")
        yield running


def notes_of(cluster: Cluster) -> list[str]:
    """The notes of a cluster."""
    return cluster.__dict__.setdefault("notes", [])


def while_recovering(cluster: Cluster, rank: int, act: object) -> threading.Thread:
    """Call `act` with the process of a rank as soon as it has started."""
    starting = StartingRank(ClusterProcesses.of(cluster).run_dir, rank)

    def watch() -> None:
        wait_until(lambda: starting.process() is not None)
        act(starting.process())  # type: ignore[operator]

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


LAUNCHER_CRASHED = re.compile(
    "mpiexec has ended with SIG(ABRT|BUS|SEGV)"
    "|rank 0 .* an unknown exit code, because its parent process has ended too"
)


def execute_or_begin_again(cluster: Cluster, folder: Path) -> bool:
    """Run the training. False if Open MPI's launcher has crashed, which ends all ranks.

    prterun 5.0.11 corrupts its memory ("malloc(): unaligned tcache chunk") in about 1
    of 60 spawns during which a rank dies.
    """
    try:
        cluster.execute(TRAIN, timeout_s=150)
    except CellError as error:
        said = "\n".join([*notes_of(cluster), error.note or ""])
        assert LAUNCHER_CRASHED.search(said), said
        notes_of(cluster).clear()
        prepare(cluster, folder)
        cluster.execute("here_before = 1")
        return False
    return True


def kill(survivor: psutil.Process | None, newcomer: psutil.Process) -> None:
    (survivor or newcomer).kill()


@pytest.mark.parametrize("who", ["newcomer", "survivor"])
def test_a_second_death_during_a_recovery_is_repaired(
    cluster: Cluster, tmp_path: Path, who: str
) -> None:
    was_trained = False
    while not was_trained:
        survivor = psutil.Process(cluster.ranks[2].pid)
        victim = None if who == "newcomer" else survivor
        cluster.execute("if rank == 1: events = [(6, 'forward', die)]")
        other = while_recovering(cluster, 1, partial(kill, victim))
        was_trained = execute_or_begin_again(cluster, tmp_path)
        other.join(10)
    assert cluster["result"] == [STEPS] * 3
    assert cluster["here_before"] == [1] * 3  # the variables of a survivor
    (note,) = notes_of(cluster)
    lost = "1-2" if who == "survivor" else "1"
    # A death during the merge itself ends in a restart of all ranks.
    assert f"rank {lost} was replaced" in note or "were started again" in note
    assert "steps continues" in note
    cluster.execute("new = nbdist.elastic.State(step=0); assert new.step == 0")


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_a_second_death_at_any_moment_of_a_recovery_loses_no_variables(
    cluster: Cluster, tmp_path: Path, rounds: int
) -> None:
    moments = random.Random(SEED)
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        cluster.push(folder=str(folder))
        survivor = psutil.Process(cluster.ranks[2].pid)
        delay_s = moments.uniform(0, 0.08)

        def kill_later(
            _newcomer: psutil.Process,
            survivor: psutil.Process = survivor,
            delay_s: float = delay_s,
        ) -> None:
            time.sleep(delay_s)  # the moment is drawn at random
            survivor.kill()

        cluster.execute("events = [(6, 'forward', die)] if rank == 1 else []")
        other = while_recovering(cluster, 1, kill_later)
        was_trained = execute_or_begin_again(cluster, folder)
        other.join(10)
        if not was_trained:
            continue
        assert cluster["result"] == [STEPS] * 3, notes_of(cluster)
        assert cluster["here_before"] == [1] * 3, notes_of(cluster)


COUNTED = """
_commit = nbdist.elastic.State.commit

def commit(state):
    _commit(state)
    if rank == 0:
        with open(folder + "/committed", "ab") as file:
            file.write(b".")
        while state.step == last_step and not os.path.exists(folder + "/killed"):
            time.sleep(0.01)  # the end of the training does not overtake the kill

nbdist.elastic.State.commit = commit
"""


@pytest.mark.parametrize("seed", [90210, pytest.param(4711, marks=pytest.mark.slow)])
def test_the_last_commit_outlives_the_death_of_all_ranks_at_once(
    tmp_path: Path, seed: int
) -> None:
    print(f"seed {seed}")
    committed, killed = tmp_path / "committed", tmp_path / "killed"
    moment = random.Random(seed).randrange(1, STEPS - 1)
    with Cluster(n=2, device="cpu", threads=1) as cluster:
        cluster.on_note = notes_of(cluster).append
        given = f"folder, last_step = {str(tmp_path)!r}, {STEPS - 1}\n"
        cluster.execute(given + SETUP + COUNTED, setup=True)
        killed.touch()
        cluster.execute(TRAIN, timeout_s=60)
        reference = weights(cluster)[0]
        committed.write_bytes(b"")
        killed.unlink()
        processes = [psutil.Process(info.pid) for info in cluster.ranks]
        sizes = []

        def end_all() -> None:
            wait_until(lambda: committed.stat().st_size >= moment, 60)
            for process in processes:
                process.kill()
            psutil.wait_procs(processes, 10)
            sizes.append(committed.stat().st_size)
            killed.touch()

        killer = threading.Thread(target=end_all)
        killer.start()
        cluster.execute(TRAIN, timeout_s=120)
        killer.join(10)
        assert_trained(cluster, reference)
        note = notes_of(cluster)[-1]
        assert note.endswith("steps continues from its commit")
        for process in processes:
            assert re.search(rf"pid {process.pid} .* SIGKILL", note)
        # From the last commit that was recorded, or the commit that was under way.
        assert committed.stat().st_size in (STEPS, STEPS - 1), (sizes, moment)
        assert sizes[0] < STEPS


def test_the_last_commit_is_kept_when_the_ranks_do_not_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise StartError("no room for ranks")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Cluster(n=2, device="cpu", threads=1) as cluster:
        prepare(cluster, tmp_path)
        monkeypatch.setattr(cluster, "start", fail)
        cluster.execute("events = [(6, 'forward', lambda: os.kill(os.getpid(), 9))]")
        cluster.execute("first_time = lambda event: True")
        with pytest.raises(RankDied, match=r"no room for ranks\. .*--resume") as lost:
            cluster.execute(TRAIN, timeout_s=60)
    # `lost` keeps the frames that the error has left.
    assert [name for name in open_files() if "/commits" in name] == []
    kept = str(lost.value).rsplit(" ", 1)[1]
    state = State(model=torch.nn.Linear(8, 4), step=0)
    with pytest.raises(CheckpointError, match="holds model, optimizer, sampler, step"):
        state.load(kept)
    assert checkpoint.check(Path(kept)).header["commit"] == 7  # the first before step 0


def test_the_last_commit_is_kept_when_a_setup_cell_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    given = f"folder = {str(tmp_path)!r}\n"
    once = "if os.path.exists(folder + '/die'): raise ValueError('no data set')"
    with Cluster(n=2, device="cpu", threads=1) as cluster:
        cluster.execute(given + SETUP + once, setup=True, number=3)
        cluster.execute("events = [(6, 'forward', die)]; first_time(die)")
        cluster.execute("first_time = lambda event: True")
        with pytest.raises(CellError) as lost:
            cluster.execute(TRAIN, timeout_s=60)
        assert str(lost.value).count("has died with SIGKILL") == 2
        assert "ValueError: no data set" in str(lost.value)
        assert "the last commit, number 7, is kept" in str(lost.value)
        kept = Path(str(lost.value).rsplit(" ", 1)[1])
        assert checkpoint.check(kept).header["commit"] == 7


EARLY = """
def die_early(now):
    if now == place and os.path.exists(folder + "/lost"):
        with contextlib.suppress(FileExistsError):
            os.close(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_EXCL))
            if rank in victims:
                die()

def lose_all():
    os.close(os.open(folder + "/lost", os.O_CREAT))
    for pid in sorted(pids, key=os.getpid().__eq__):
        os.kill(pid, signal.SIGKILL)

die_early("setup cell")
"""


@pytest.mark.parametrize("victims", [[1], [0, 1]], ids=["one", "all"])
@pytest.mark.parametrize("place", ["setup cell", "cell"])
def test_ranks_may_die_before_they_enter_the_run_again(
    tmp_path: Path, place: str, victims: list[int]
) -> None:
    given = f"folder, place, victims = {str(tmp_path)!r}, {place!r}, {victims}\n"
    with Cluster(n=2, device="cpu", threads=1) as cluster:
        cluster.on_note = notes_of(cluster).append
        setup = given + "import contextlib\n" + SETUP + EARLY
        cluster.execute(setup, setup=True)
        cluster.execute("pids = nbdist.all_gather_object(os.getpid())")
        cluster.execute("if rank == 1: events = [(6, 'forward', lose_all)]")
        cluster.execute("die_early('cell'); " + TRAIN, timeout_s=120)
        assert cluster["result"] == [STEPS] * 2
        assert [sorted(seen) for seen in cluster["state.seen"]] == [[*range(240)]] * 2
        assert {path.name for path in tmp_path.iterdir()} >= {"0", "1", "lost"}
        assert any("continues from its commit" in note for note in notes_of(cluster))


def test_a_recovery_that_fails_while_only_a_newcomer_lives_keeps_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run and its commit are kept, although no rank is paused in it."""
    recover = Recovery.recover

    def fail(recovery: Recovery, ask: Any = None) -> str:
        monkeypatch.undo()
        recover(recovery, ask)
        (survivor,) = [info for info in cluster.ranks if info.rank == 0]
        psutil.Process(survivor.pid).kill()
        wait_until(lambda: [info.rank for info in cluster.ranks] == [1])
        raise ChangeFailed("the ranks did not meet")

    with Cluster(n=2, device="cpu", threads=1) as cluster:
        cluster.on_note = notes_of(cluster).append
        given = f"folder = {str(tmp_path)!r}\n"
        cluster.execute(given + SETUP, setup=True)
        cluster.execute("if rank == 1: events = [(6, 'forward', die)]")
        monkeypatch.setattr(Recovery, "recover", fail)
        cluster.execute(TRAIN, timeout_s=120)
        assert notes_of(cluster)[-1].endswith("steps continues from its commit")
        assert cluster["result"] == [STEPS] * 2
        assert [len(seen) for seen in cluster["state.seen"]] == [240] * 2


MPICH = shutil.which("mpiexec.mpich")


@pytest.mark.skipif(MPICH is None, reason="no MPICH is installed")
def test_without_fault_tolerance_all_ranks_restart_from_the_last_commit(
    tmp_path: Path,
) -> None:
    cell = f"""
import os, signal
state = nbdist.elastic.State(step=0)

@nbdist.elastic.run(max_restarts=1)
def count(state):
    first_step = state.step
    while state.step < 10:
        state.step += 1
        if state.step in dies_at and rank == 1:
            open({str(tmp_path / "died")!r}, "a").close()
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
    return first_step

result = count(state)
"""
    once = f"import os\ndies_at = [] if os.path.exists('{tmp_path / 'died'}') else [6]"
    with Cluster(n=2, device="cpu", threads=1, mpiexec=MPICH) as cluster:
        cluster.on_note = notes_of(cluster).append
        cluster.execute(once, setup=True)
        cluster.execute(cell, timeout_s=60)
        assert cluster["result"] == [5, 5]
        assert cluster["state.step"] == [10, 10]
        assert "died with SIGKILL" in notes_of(cluster)[0]
        assert "All 2 ranks were started again" in notes_of(cluster)[0]
        with pytest.raises(
            RankDied, match=r"max_restarts=1 are used up.*--resume"
        ) as e:
            cluster.execute("dies_at = [8]; _setup = 1\n" + cell.replace("[6]", "[8]"))
    kept = Path(str(e.value).rsplit(" ", 1)[1])
    try:
        with Cluster(n=3, device="cpu", threads=1, resume=str(kept)) as resumed:
            made = "state = nbdist.elastic.State(step=0)"
            result = resumed.execute(made)
            assert resumed["state.step"] == [7] * 3
            assert f"resumed from {kept}" in result[0].stdout
            assert result[1].stdout == ""
    finally:
        kept.unlink()


def test_a_checkpoint_resumes_in_a_world_of_another_size(tmp_path: Path) -> None:
    path = tmp_path / "run.state"
    scaled = """
train = nbdist.elastic.run(steps)
scales = []
def rescale(old, new):
    scales.append((old, new))
"""
    with Cluster(n=4, device="cpu", threads=1) as cluster:
        prepare(cluster, tmp_path)
        cluster.push(path=str(path))
        half = "s = make_state(path, save_every=5)\nsteps_left = 10\n"
        cluster.execute(
            half + "@nbdist.elastic.run\ndef some(state):\n"
            "    for indices in state.sampler:\n"
            "        step_of(state, DDP(state.model), indices)\n"
            "        state.commit()\n"
            "        if state.step == 10: return\n"
            "some(s)",
            timeout_s=60,
        )
    with Cluster(n=2, device="cpu", threads=1, resume=str(path)) as cluster:
        prepare(cluster, tmp_path)
        cluster.execute(scaled)
        cluster.execute("state = make_state(); state.on_reset(rescale)")
        before = cluster["state.step"]
        assert before == [9, 9]  # the first of five commits was before the first step
        cluster.execute("result = train(state)", timeout_s=60)
        assert cluster["result"] == [STEPS] * 2
        assert cluster["scales"] == [[(4, 2)]] * 2
        assert sorted(cluster["state.seen"][0]) == list(range(240))
    path.write_bytes(b"NBDSTATE and nothing else")
    Cluster(n=2, device="cpu", resume=str(path))  # the previous one is whole
    path.with_name("run.state.previous").unlink()
    with pytest.raises(CheckpointError, match=r"run\.state is not a file"):
        Cluster(n=2, device="cpu", resume=str(path))
