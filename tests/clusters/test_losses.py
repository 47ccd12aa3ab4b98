"""Deaths that one replacement does not repair: of all ranks, of helper processes, and
of ranks while the others change the world."""

from __future__ import annotations

import _thread
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbdist.clusters import membership, recovery
from nbdist.clusters.cluster import Cluster
from nbdist.clusters.supervisor_client import SupervisorClient
from nbdist.errors import CellError, ScaleFailed, UsageError
from nbdist.ipc.private_files import memory_folder, rendezvous_folder
from tests.cluster_processes import ClusterProcesses
from tests.processes import wait_until

SUM = """
x = torch.full((3,), rank + 1.0)
nbdist.all_reduce(x)
assert x.eq(world_size * (world_size + 1) / 2).all(), x
y = torch.full((3,), rank + 1.0)
dist.all_reduce(y)
assert y.eq(x).all(), y
"""
LEAVES = """
from types import SimpleNamespace
group = dist.group.WORLD
handles = [None] * world_size
dist.all_gather_object(handles, group.get_reconfigure_handle())
if rank != 1:
    group.reconfigure(SimpleNamespace(uuid=rank, handles=[handles[rank]]))
    assert dist.get_world_size() == 1
"""
LIVES_ON = """
import os, signal
from types import SimpleNamespace
from nbdist.errors import CollectiveAborted
group = dist.group.WORLD
handles = [None] * world_size
dist.all_gather_object(handles, group.get_reconfigure_handle())
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(2))
except CollectiveAborted:
    group.reconfigure(SimpleNamespace(uuid=1, handles=[handles[0], handles[2]]))
x = torch.full((2,), rank + 1)
dist.all_reduce(x)
found = dist.get_world_size(), x.tolist()
"""
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def _lasting() -> Iterator[Cluster]:
    with Cluster(n=3, device="cpu", threads=1) as running:
        running.execute("prepared = 7", setup=True)
        yield running


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def cluster(_lasting: Cluster, notes: list[str]) -> Cluster:
    """Three ranks, started again if an earlier test has ended them."""
    running = _lasting
    running.repair()
    if running.size != 3:
        running.scale(3, drop=True)
    running.on_note = notes.append
    running.execute("mine = 100 + rank")
    return running


@pytest.fixture
def setup_fails(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """A file. A setup cell fails while it exists."""
    flag = tmp_path / "fails"
    code = (
        f"import os\nif os.path.exists({str(flag)!r}): raise ValueError('no data set')"
    )
    cluster.execute(code, setup=True, number=12)
    yield flag
    flag.unlink()  # the cluster keeps the cell


def helper_pid(cluster: Cluster, name: str) -> int:
    """The pid of the process supervisor, the controller or mpiexec."""
    helper = ClusterProcesses.of(cluster).helper(name)
    assert helper is not None
    return helper.pid


def kill_all(cluster: Cluster) -> None:
    for info in cluster.infos:
        os.kill(info.pid, signal.SIGKILL)


# -- one rank ----------------------------------------------------------------------

CRASH = """
import ctypes, os
def load(step):
    if rank == 1:
        {crash}
load(7)
nbdist.barrier()
"""


@pytest.mark.parametrize(
    ("crash", "signal_name"),
    [("ctypes.string_at(0)", "SIGSEGV"), ("os.abort()", "SIGABRT")],
)
def test_a_crash_in_c_code_names_the_users_line(
    cluster: Cluster, notes: list[str], crash: str, signal_name: str
) -> None:
    with pytest.raises(CellError) as lost:
        cluster.execute(CRASH.format(crash=crash), number=5)
    died = f"has died with {signal_name} in In[5] line 5\n"
    assert died in str(lost.value)
    shown = "\n".join(lost.value._render_traceback_())
    assert f"{died}its Python stack:\n  In[5] line 6, in <module>\n" in shown
    assert "nbdist/engine" not in shown


def test_a_crash_between_cells_is_reported_by_the_next_cell(
    cluster: Cluster, notes: list[str]
) -> None:
    os.kill(cluster.ranks[2].pid, signal.SIGSEGV)
    wait_until(lambda: 2 in cluster.died(), DEADLINE_S)
    cluster.execute(SUM)
    assert "has died with SIGSEGV\nits Python stack:\n" in notes[-1]
    assert "rank 2 was replaced" in notes[-1]


def test_living_ranks_reconfigure_their_group_in_the_same_cell(
    cluster: Cluster,
) -> None:
    with pytest.raises(CellError, match="has died with SIGKILL"):
        cluster.execute(LIVES_ON, timeout_s=DEADLINE_S)
    assert cluster["found"] == [(2, [4, 4])] * 3  # the new rank gets a copy
    cluster.execute(SUM)  # rank 1 is replaced, and all ranks are members again
    assert cluster["dist.get_world_size()"] == [3, 3, 3]


def test_the_default_group_has_all_ranks_again_in_the_next_cell(
    cluster: Cluster,
) -> None:
    for _ in range(2):  # the numbers of `reconfigure` begin again
        cluster.execute(LEAVES)
        cluster.execute(SUM + "assert mine == 100 + rank")
        assert cluster["dist.get_world_size()"] == [3, 3, 3]


def test_a_rank_that_is_replaced_on_request_is_not_reported_as_dead(
    cluster: Cluster, notes: list[str]
) -> None:
    cluster.replace([1])
    assert "was ended, as requested" in notes[-1]
    assert "rank 1 was replaced" in notes[-1]
    assert "died" not in notes[-1]
    os.kill(cluster.ranks[1].pid, signal.SIGKILL)
    wait_until(lambda: 1 in cluster.died(), DEADLINE_S)
    cluster.execute(SUM)
    assert "has died with SIGKILL" in notes[-1]


def test_a_rank_that_is_replaced_logs_at_the_steps_of_the_others(
    cluster: Cluster,
) -> None:
    cluster.execute("nbdist.log(resumed=1.0, step=100)")
    os.kill(cluster.ranks[2].pid, signal.SIGKILL)
    wait_until(lambda: 2 in cluster.died(), DEADLINE_S)
    cluster.execute("nbdist.log(resumed=2.0)")

    def last_steps() -> list[float]:
        series = cluster.collector.history("resumed").values()
        return [steps[-1] for steps, _ in series]

    wait_until(
        lambda: last_steps() == [101.0] * 3, DEADLINE_S, lambda: str(last_steps())
    )


# -- all ranks ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    ],
)
def test_all_ranks_that_end_in_a_cell_are_started_again(
    cluster: Cluster, notes: list[str], fault: str, how: str
) -> None:
    said = "import sys; print('last words', file=sys.stderr, flush=True)\n"
    said += "import time; time.sleep(0.2)\n"
    with pytest.raises(CellError) as lost:
        cluster.execute(said + fault, timeout_s=DEADLINE_S)
    for info in range(3):
        assert f"rank {info} (pid " in str(lost.value)
    assert str(lost.value).count(f"has died with {how}") == 3
    assert "the next cell starts 3 ranks again" in str(lost.value)
    cluster.execute(SUM + "assert prepared == 7 and 'mine' not in globals()")
    assert "3 ranks were started again, without their variables" in notes[-1]
    assert how in notes[-1]


def test_all_ranks_that_are_killed_between_cells_are_started_again(
    cluster: Cluster, notes: list[str]
) -> None:
    kill_all(cluster)
    wait_until(lambda: len(cluster.died()) == 3)
    cluster.execute(SUM)
    assert notes[-1].count("SIGKILL") == 3


def test_a_failed_setup_cell_after_the_death_of_all_ranks_names_the_deaths(
    cluster: Cluster, setup_fails: Path
) -> None:
    pids = [info.pid for info in cluster.infos]
    ends = "os._exit(3) if rank == 0 else os.kill(os.getpid(), 9)"
    with pytest.raises(CellError):
        cluster.execute(f"import os; {ends}", timeout_s=DEADLINE_S)
    setup_fails.touch()
    with pytest.raises(CellError) as failed:
        cluster.execute("ran = True")
    message = str(failed.value)
    for pid, end in zip(pids, ["exit code 3", "SIGKILL", "SIGKILL"], strict=True):
        assert re.search(rf"pid {pid} on \S+\) has died with {end}", message)
    assert "ranks 0-2 of 3 in In[12] line 2: ValueError: no data set" in message
    assert message.endswith("without their variables, and a setup cell failed")
    assert cluster["prepared == 7 and 'ran' not in globals()"] == [True] * 3


def test_replacing_every_rank_is_refused(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match=r"rank 0-2 is every rank.*%dist_restart"):
        cluster.replace([0, 1, 2])
    assert cluster["mine"] == [100, 101, 102]


def test_ranks_that_ignore_an_interrupt_can_be_restarted(cluster: Cluster) -> None:
    deaf = """
import time
end = time.monotonic() + 12
while time.monotonic() < end:
    try:
        while time.monotonic() < end: time.sleep(0.01)
    except BaseException: pass
"""
    with pytest.raises(CellError) as late:
        cluster.execute(deaf, timeout_s=0.5)
    assert "%dist_restart starts all ranks again" in str(late.value)
    assert "%dist_restart -r" not in str(late.value)
    cluster.restart()
    cluster.execute(SUM)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_c_code_holds_is_replaced_alone(
    cluster: Cluster, rank: int
) -> None:
    """No thread of Python runs on that rank, and no signal ends the call."""
    cluster.execute("mine = rank")
    pids = [info.pid for info in cluster.ranks]
    held = f"""
import ctypes
mutex = ctypes.create_string_buffer(64)
if rank == {rank}:
    with_gil = ctypes.PyDLL(None)
    with_gil.pthread_mutex_lock(mutex)
    with_gil.pthread_mutex_lock(mutex)
"""
    with pytest.raises(CellError) as late:
        cluster.execute(held, timeout_s=0.5)
    assert f"%dist_restart -r {rank}" in str(late.value)
    cluster.replace([rank])
    others = [each for each in range(3) if each != rank]
    assert [r for r in range(3) if cluster.ranks[r].pid == pids[r]] == others
    assert [cluster["mine"][each] for each in others] == others
    cluster.execute(SUM)


def test_without_replacement_dead_ranks_are_not_started_again(cluster: Cluster) -> None:
    with Cluster(n=2, device="cpu", threads=1, on_failure="shrink") as two:
        kill_all(two)
        wait_until(lambda: len(two.died()) == 2)
        with pytest.raises(Exception, match=r"SIGKILL.*"):
            two.execute("1")
        two.restart()
        two.execute(SUM)


# -- a rank's parent process -------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_death_of_a_rank_parent_ends_only_its_rank(
    cluster: Cluster, rank: int
) -> None:
    before = [info.pid for info in cluster.infos]
    parent = cluster.infos[rank].parent_pid
    killer = threading.Timer(0.2, os.kill, (parent, signal.SIGKILL))
    killer.start()
    with pytest.raises(CellError, match=rf"rank {rank} .*parent process has ended"):
        cluster.execute(
            f"import threading\nif rank == {rank}: threading.Event().wait()\n"
            "nbdist.barrier()",
            timeout_s=DEADLINE_S,
        )
    cluster.execute(SUM + "mine = globals().get('mine')")
    kept = [info.pid == pid for info, pid in zip(cluster.infos, before, strict=True)]
    assert kept == [r != rank for r in range(3)]
    others = [r for r in range(3) if r != rank]
    assert cluster.pull("mine", others) == [100 + r for r in others]


def test_a_rank_with_a_stopped_parent_dies(cluster: Cluster) -> None:
    os.kill(cluster.infos[1].parent_pid, signal.SIGSTOP)
    os.kill(cluster.infos[1].pid, signal.SIGKILL)
    with pytest.raises(CellError, match="parent process does not answer"):
        cluster.execute("nbdist.barrier()", timeout_s=DEADLINE_S)
    cluster.execute(SUM)


# -- helper processes --------------------------------------------------------------


def test_ranks_continue_after_the_death_of_a_rank_that_was_spawned_with_them(
    cluster: Cluster, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # No rank may wait for others that never come.
    monkeypatch.setattr(membership, "MEET_TIMEOUT_S", 3600.0)

    def strike(*ranks: int) -> None:
        """Kill these ranks, and have them replaced."""
        for rank in ranks:
            os.kill(cluster.infos[rank].pid, signal.SIGKILL)
        wait_until(lambda: cluster.died().keys() == set(ranks))
        cluster.execute(SUM)

    cluster.scale(1, drop=True)
    cluster.scale(4)  # ranks 1 to 3 are spawned together
    cluster.execute("mine = 100 + rank")
    strike(0, 1)
    assert "rank 0-1 was replaced" in notes[-1]
    assert cluster["mine"] == [102, 102, 102, 103]
    cluster.execute("mine = 100 + rank")
    strike(1, 2, 3)  # the last of the two that were spawned
    assert "rank 1-3 was replaced" in notes[-1]
    assert cluster["mine"] == [100] * 4


def test_no_process_maps_a_file_in_the_temporary_folder(cluster: Cluster) -> None:
    """The first use of a page raises SIGBUS if the disk is full."""
    run_dir = cluster._live().run_dir
    if memory_folder(run_dir) == run_dir:
        pytest.skip("there is no room in /dev/shm")
    pids = [*(info.pid for info in cluster.infos), helper_pid(cluster, "mpiexec")]
    maps = [region.path for p in pids for region in psutil.Process(p).memory_maps()]
    assert not [path for path in maps if path.startswith(f"{run_dir}/")]
    segments = list(rendezvous_folder(run_dir).glob("sm_segment.*"))
    assert len(segments) >= cluster.size
    for path in segments:
        assert path.stat().st_blocks * 512 >= path.stat().st_size > 0


@pytest.mark.parametrize("name", ["process supervisor", "controller", "mpiexec"])
def test_a_killed_helper_is_named_and_the_world_is_restarted(
    cluster: Cluster, notes: list[str], name: str
) -> None:
    os.kill(helper_pid(cluster, name), signal.SIGKILL)
    wait_until(lambda: bool(notes))
    said = {"process supervisor": "the process supervisor"}.get(name, name)
    assert notes == [f"{said} has ended with SIGKILL, and all ranks with it"]
    cluster.execute(SUM + "assert prepared == 7")
    assert said in notes[-1]
    assert "3 ranks were started again" in notes[-1]


@pytest.mark.parametrize("name", ["process supervisor", "controller", "mpiexec"])
def test_a_killed_helper_is_named_though_the_ranks_deaths_are_heard_first(
    cluster: Cluster, notes: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    registry = cluster._live()
    report, on_death = SupervisorClient._report_loss, registry._exit_monitor._on_death
    heard: set[int] = set()

    def hear(rank: int) -> None:
        on_death(rank)
        heard.add(rank)

    def report_last(client: SupervisorClient, program: str, code: int) -> None:
        wait_until(lambda: len(heard) == cluster.size)
        report(client, program, code)

    monkeypatch.setattr(registry._exit_monitor, "_on_death", hear)
    monkeypatch.setattr(SupervisorClient, "_report_loss", report_last)
    os.kill(helper_pid(cluster, name), signal.SIGKILL)
    wait_until(lambda: bool(notes))
    cluster.execute(SUM)
    assert f"{name} has ended with SIGKILL, and all ranks with it" in notes[-1]


def test_a_killed_helper_ends_the_running_cell(cluster: Cluster) -> None:
    timer = threading.Timer(0.5, os.kill, (helper_pid(cluster, "mpiexec"), 9))
    timer.start()
    with pytest.raises(CellError, match="mpiexec has ended with SIGKILL"):
        cluster.execute("import time; time.sleep(3600)")
    cluster.execute(SUM)


@pytest.mark.parametrize("name", ["process supervisor", "controller", "mpiexec"])
def test_a_stopped_helper_is_continued(
    cluster: Cluster, notes: list[str], name: str
) -> None:
    process = psutil.Process(helper_pid(cluster, name))
    process.suspend()
    wait_until(lambda: bool(notes))
    assert f"(pid {process.pid}) was stopped, and has been continued" in notes[0]
    cluster.execute(SUM)
    assert cluster["mine"] == [100, 101, 102]


def test_a_cluster_with_a_stopped_process_supervisor_can_be_stopped() -> None:
    running = Cluster(n=1, device="cpu").start()
    os.kill(helper_pid(running, "process supervisor"), signal.SIGSTOP)
    running.stop()
    assert not running.running


# -- while the world changes -------------------------------------------------------


STAGES = ["starting Python", "loading torch", "joining MPI", "registering"]
"""The stages of a rank's start, in their order."""


def at_stage(cluster: Cluster, name: str, stage: str, act: Callable[[int], Any]) -> Any:
    """Call `act(pid)` once a process of the cluster has reached a stage.

    A forked rank passes its first stages within milliseconds, so that a later stage may
    be the first that is seen.
    """
    stages = STAGES[STAGES.index(stage) :]
    assert cluster._started is not None
    path = cluster._started.process_supervisor.run_dir / f"{name}.stage"

    def look() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if path.exists():
                record = json.loads(path.read_text())
                if record["stage"] in stages:
                    act(record["pid"])
                    return
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    return thread


@pytest.mark.parametrize("stage", STAGES[:3])
@pytest.mark.parametrize("victim", ["first", "last", "newcomer"])
def test_a_rank_dies_while_the_world_grows(
    cluster: Cluster, victim: str, stage: str
) -> None:
    generation = 1 + max(info.generation for info in cluster.infos)
    pid = {"first": cluster.infos[0].pid, "last": cluster.infos[2].pid}.get(victim)

    def strike(newcomer: int) -> None:
        os.kill(pid or newcomer, signal.SIGKILL)

    # Generations that failed are counted too: look at whichever comes first.
    watcher = at_stage(cluster, f"rank3-{_next(cluster, generation)}", stage, strike)
    with pytest.raises(ScaleFailed, match=r"SIGKILL|unknown exit code"):
        cluster.scale(4)
    watcher.join()
    assert cluster.size == 3
    cluster.execute(SUM, timeout_s=DEADLINE_S)
    gone = {"first": 0, "last": 2}.get(victim)
    kept = [r for r in range(3) if r != gone]
    assert cluster.pull("mine", kept) == [100 + r for r in kept]


def test_all_ranks_die_while_the_world_grows(cluster: Cluster) -> None:
    name = f"rank3-{_next(cluster, 0)}"
    watcher = at_stage(cluster, name, "loading torch", lambda _pid: kill_all(cluster))
    with pytest.raises(ScaleFailed, match="the next cell starts 3 ranks again") as lost:
        cluster.scale(4)
    watcher.join()
    assert str(lost.value).count("SIGKILL") == 3
    cluster.execute(SUM)
    assert cluster.size == 3


def _next(cluster: Cluster, generation: int) -> int:
    """The generation of the next change."""
    assert cluster._recovery is not None
    return max(generation, cluster._recovery._membership._generation + 1)


@pytest.mark.parametrize("second", [0, 1, "newcomer"])
def test_another_rank_dies_during_a_recovery(
    cluster: Cluster, notes: list[str], second: int | str
) -> None:
    victim = None if second == "newcomer" else cluster.infos[int(second)].pid
    name = f"rank2-{_next(cluster, 0)}"
    watcher = at_stage(
        cluster,
        name,
        "joining MPI",
        lambda newcomer: os.kill(victim or newcomer, signal.SIGKILL),
    )
    os.kill(cluster.infos[2].pid, signal.SIGKILL)
    with pytest.raises(CellError, match="rank 2 "):
        cluster.execute("nbdist.barrier()", timeout_s=DEADLINE_S)
    watcher.join()
    cluster.execute(SUM, timeout_s=DEADLINE_S)
    assert cluster.size == 3
    kept = [r for r in range(2) if r != second]
    assert cluster.pull("mine", kept) == [100 + r for r in kept]


def test_a_newcomer_that_does_not_start_is_abandoned(
    cluster: Cluster, notes: list[str]
) -> None:
    """There are two attempts. Then the others continue without it."""
    assert cluster._started is not None
    run_dir = cluster._started.process_supervisor.run_dir
    seen = set(run_dir.glob("rank2-*.stage"))
    stop = threading.Event()

    def kill_newcomers() -> None:
        while not stop.wait(0.005):
            for path in set(run_dir.glob("rank2-*.stage")) - seen:
                record = json.loads(path.read_text())
                if record["stage"] == "joining MPI":
                    seen.add(path)
                    os.kill(record["pid"], signal.SIGKILL)

    os.kill(cluster.infos[2].pid, signal.SIGKILL)
    wait_until(lambda: 2 in cluster.died())
    thread = threading.Thread(target=kill_newcomers)
    thread.start()
    try:
        cluster.repair()
    finally:
        stop.set()
        thread.join()
    assert "rank 2 could not be replaced and was dropped (new rank 2 en" in notes[0]
    assert "the world has 2 ranks now; %dist_scale -n 3 tries again" in notes[0]
    cluster.execute(SUM)
    assert cluster["mine"] == [100, 101]
    cluster.scale(3)
    cluster.execute(SUM)


# An interrupt within psutil may leave a file of /proc to the garbage collection.
@pytest.mark.filterwarnings("ignore:.*/proc/:pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_recovery_is_resumed_by_the_next_cell(
    cluster: Cluster, notes: list[str]
) -> None:
    name = f"rank1-{_next(cluster, 0)}"
    watcher = at_stage(
        cluster, name, "loading torch", lambda _pid: _thread.interrupt_main()
    )
    os.kill(cluster.infos[1].pid, signal.SIGKILL)
    with pytest.raises(CellError, match="the recovery was interrupted"):
        cluster.execute("nbdist.barrier()", timeout_s=DEADLINE_S)
    watcher.join()
    cluster.execute(SUM)
    assert "rank 1 was replaced" in notes[-1]
    assert cluster.pull("mine", [0, 2]) == [100, 102]


def test_a_rank_that_does_not_answer_is_replaced_alone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its control thread has ended."""
    monkeypatch.setattr(recovery, "ANSWER_TIMEOUT_S", 5.0)
    before = [info.pid for info in cluster.infos]
    loop = "get_ipython().kernel.control_thread.io_loop.asyncio_loop"
    ends = f"import sys\n{loop}.call_soon_threadsafe(sys.exit)"
    cluster.execute(ends, ranks=[0])
    os.kill(cluster.infos[2].pid, signal.SIGKILL)
    with pytest.raises(CellError, match="rank 0 did not answer for 5 s") as lost:
        cluster.execute("nbdist.barrier()", timeout_s=DEADLINE_S)
    assert "rank 0,2 was replaced" in str(lost.value)
    after = [info.pid for info in cluster.infos]
    assert [rank for rank in range(3) if after[rank] == before[rank]] == [1]
    cluster.execute(SUM)
    assert cluster["mine"] == [101, 101, 101]


def test_survivors_that_cannot_rebuild_the_world_are_restarted_with_their_variables(
    cluster: Cluster, setup_fails: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 hangs in C code during the change. Its control thread answers."""
    monkeypatch.setattr(cluster._recovery._membership, "_meet_timeout_s", 5.0)
    setup_fails.touch()
    hang = "import nbdist.engine.membership as m, threading\n"
    hang += "m._carry_out = lambda plan, attempt: threading.Event().wait()"
    cluster.execute(hang, ranks=[0])
    os.kill(cluster.infos[2].pid, signal.SIGKILL)
    with pytest.raises(CellError, match="ValueError: no data set") as lost:
        cluster.execute("nbdist.barrier()", timeout_s=DEADLINE_S)
    assert "does not answer" in str(lost.value)
    assert "rank 0-1 has its variables, rank 2 those of rank 0" in str(lost.value)
    cluster.execute(SUM)
    assert cluster["mine"] == [100, 101, 100]
