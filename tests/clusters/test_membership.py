"""A rank that dies is replaced or dropped; a running world grows and shrinks."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nbdist
from nbdist.clusters.cluster import Cluster
from nbdist.errors import CellError, CellInterrupted, RankDied, UsageError
from tests.clusters.test_cells import Outcomes
from tests.clusters.test_slow_values import SLOW, pressed_when
from tests.processes import wait_until
from tests.seed import SEED

SUM = """
x = torch.full((3,), rank + 1.0)
nbdist.all_reduce(x)
y = torch.full((2,), rank + 1.0)
dist.all_reduce(y)
assert x.eq(world_size * (world_size + 1) / 2).all(), x
assert y.eq(world_size * (world_size + 1) / 2).all(), y
assert (rank, world_size) == (dist.get_rank(), dist.get_world_size())
assert (rank, world_size) == (nbdist.rank(), nbdist.size())
assert (str(rank), str(world_size)) == (os.environ["RANK"], os.environ["WORLD_SIZE"])
"""


@pytest.fixture(scope="module")
def _mortal_cluster() -> Iterator[Cluster]:
    with Cluster(n=4) as running:
        running.execute("import os, signal", setup=True)
        yield running


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def cluster(_mortal_cluster: Cluster, notes: list[str]) -> Iterator[Cluster]:
    """Four ranks, repaired if an earlier test has killed some.

    No message of theirs may have been refused.
    """
    running = _mortal_cluster
    running.scale(4, drop=True)
    running.on_note = notes.append
    running.execute("import threading; mine = 100 + rank; handle = threading.Lock()")
    yield running
    assert running.refused(running.status()) == 0


def pids(cluster: Cluster) -> list[int]:
    return [info.pid for info in cluster.ranks]


def kill(cluster: Cluster, rank: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Kill a rank's process, and wait until the cluster knows it."""
    os.kill(cluster.ranks[rank].pid, signum)
    with pytest.raises(CellError):
        cluster.execute("nbdist.barrier()", timeout_s=60)


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_dead_rank_is_replaced_and_the_others_stay(
    cluster: Cluster, rank: int
) -> None:
    before = pids(cluster)
    death = f"if rank == {rank}: os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(CellError) as caught:
        cluster.execute(death + "\nnbdist.all_reduce(torch.ones(2))", timeout_s=60)
    assert f"rank {rank} (pid {before[rank]}" in str(caught.value)
    assert "SIGKILL" in str(caught.value)
    assert f"rank {rank} was replaced" in str(caught.value)
    assert "handle" in str(caught.value)  # what could not be copied is named
    after = pids(cluster)
    assert [a == b for a, b in zip(after, before, strict=True)] == [
        r != rank for r in range(4)
    ]
    cluster.execute(SUM, timeout_s=30)
    oldest = 1 if rank == 0 else 0
    expected = [100 + (oldest if r == rank else r) for r in range(4)]
    assert cluster["mine"] == expected
    errors = cluster.run(Path("/proc/self/fd/2").read_text)
    assert "[warn]" not in "".join(errors)  # MPI keeps its connections' ends to itself


@pytest.mark.parametrize(
    ("death", "ending"),
    [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), 11)", "SIGSEGV")],
)
def test_the_error_names_the_signal_or_exit_code_of_a_dead_rank(
    cluster: Cluster, death: str, ending: str
) -> None:
    heard = Outcomes()
    with pytest.raises(CellError, match=f"died with {ending}"):
        cluster.execute(f"if rank == 1: {death}", timeout_s=60, observer=heard)
    assert [heard.by_rank[rank] == "died" for rank in range(4)] == [
        rank == 1 for rank in range(4)
    ]
    cluster.execute(SUM, timeout_s=30)


@pytest.mark.parametrize(
    "rank", [0, 1, 3, pytest.param(2, marks=pytest.mark.not_forked)]
)
def test_a_death_while_the_ranks_create_communicators_ends_no_other_rank(
    cluster: Cluster, rank: int
) -> None:
    moments = random.Random(SEED)
    for _ in range(4):
        before = pids(cluster)
        delay_s = moments.uniform(0.02, 0.06)
        with pytest.raises(CellError) as caught:
            cluster.execute(
                f"""
if rank == {rank}:
    death = os.getpid(), signal.SIGKILL
    threading.Timer({delay_s}, os.kill, death).start()
while True:
    nbdist.comm().Dup().Free()
""",
                timeout_s=60,
            )
        assert f"rank {rank} (pid {before[rank]}" in str(caught.value)
        assert "SIGSEGV" not in str(caught.value)
        cluster.execute(SUM)
        after = pids(cluster)
        assert [r for r in range(4) if before[r] != after[r]] == [rank]
    others = [r for r in range(4) if r != rank]
    assert cluster.pull("mine", ranks=others) == [100 + r for r in others]


def test_two_dead_ranks_are_replaced_before_the_next_cell(
    cluster: Cluster, notes: list[str]
) -> None:
    before = pids(cluster)
    for rank in (1, 3):
        os.kill(before[rank], signal.SIGKILL)
    wait_until(lambda: len(cluster.died()) == 2)
    cluster.execute(SUM, timeout_s=30)
    assert len(notes) == 1
    assert "rank 1,3 was replaced" in notes[0]
    assert [r for r in range(4) if pids(cluster)[r] == before[r]] == [0, 2]


def test_a_slow_variable_is_left_out_of_the_copy_and_named(
    cluster: Cluster, notes: list[str], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    cluster.execute(
        f"{SLOW}\n"
        f"stuck = Slow('pickling', (0,), {folder!r})\n"
        f"awaited = Slow('unpickling', (2,), {folder!r})\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters())"
    )
    os.kill(cluster.ranks[2].pid, signal.SIGKILL)
    wait_until(lambda: bool(cluster.died()))
    cluster.repair()
    (note,) = notes
    assert "it has the variables of rank 0, but these cannot be copied: " in note
    assert "stuck (did not pickle within 5 s)" in note
    assert "awaited (did not unpickle within 5 s)" in note
    assert "handle (TypeError: cannot pickle" in note
    assert cluster["mine"] == [100, 101, 100, 103]
    same = "optimizer.param_groups[0]['params'][0] is model.weight"
    assert cluster[same] == [True] * 4
    assert cluster["'stuck' in globals()"] == [True, True, False, True]
    cluster.execute(SUM, timeout_s=30)


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit", "GeneratorExit"])
def test_a_variable_that_raises_any_error_is_left_out_of_the_copy(
    cluster: Cluster, notes: list[str], error: str
) -> None:
    """Also one that raises an interrupt's error, with none delivered."""
    cluster.execute(
        "class Rude:\n"
        f"    def __reduce_ex__(self, protocol): raise {error}('no')\n"
        "rude = Rude()"
    )
    os.kill(cluster.ranks[2].pid, signal.SIGKILL)
    wait_until(lambda: bool(cluster.died()), 10)
    cluster.repair()
    (note,) = notes
    assert f"rude ({error}: no)" in note
    assert cluster["mine"] == [100, 101, 100, 103]


def test_an_interrupt_ends_the_copy_and_the_world_is_complete(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.execute(f"{SLOW}\nstuck = Slow('pickling', (0,), {str(tmp_path)!r})")
    os.kill(cluster.ranks[3].pid, signal.SIGKILL)
    wait_until(lambda: bool(cluster.died()))
    with pytest.raises(CellInterrupted) as stopped:  # noqa: SIM117
        with pressed_when((tmp_path / "pickling-0").exists):
            cluster.execute("ran = True")
    assert "rank 3 was replaced" in str(stopped.value)
    assert "interrupted while pickling 'stuck', at In[" in str(stopped.value)
    assert cluster["'ran' in globals()"] == [False] * 4
    cluster.execute(SUM, timeout_s=30)


@pytest.mark.parametrize(("how", "rank"), [("push", 0), ("pull", 1), ("push", 3)])
def test_a_death_ends_a_transfer_at_once(
    cluster: Cluster, tmp_path: Path, how: str, rank: int
) -> None:
    where = "unpickling" if how == "push" else "pickling"
    code = f"{SLOW}\nthing = Slow({where!r}, range(4), {str(tmp_path)!r})"
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)
    cluster.execute(code)
    pid = cluster.ranks[rank].pid

    def kill_it() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 4)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_it)
    killer.start()
    actions: dict[str, Callable[[], Any]] = {
        "push": lambda: cluster.push(thing=names["thing"]),
        "pull": lambda: cluster["thing"],
    }
    with pytest.raises(RankDied, match=rf"rank {rank} \(pid {pid}.*SIGKILL"):
        actions[how]()
    killer.join()
    cluster.execute("del thing", ranks=[r for r in range(4) if r != rank])
    cluster.execute(SUM, timeout_s=30)


FOREIGN = """
import ctypes
if rank == {rank}:
    libc = ctypes.{library}(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize(
    ("rank", "library", "place"),
    [
        (0, "CDLL", r"rank 0 at In\[\d+\] line 8"),
        (3, "PyDLL", "rank 3 does not answer"),
    ],
    ids=["in C code", "in C code that holds the GIL"],
)
def test_a_rank_that_ignores_an_interrupt_is_named_and_can_be_replaced(
    cluster: Cluster, rank: int, library: str, place: str
) -> None:
    before = pids(cluster)
    with pytest.raises(CellError, match=place) as stuck:
        cluster.execute(FOREIGN.format(rank=rank, library=library), timeout_s=0.5)
    assert f"%dist_restart -r {rank} replaces" in str(stuck.value)
    cluster.replace([rank])
    assert [r for r in range(4) if pids(cluster)[r] != before[r]] == [rank]
    assert cluster["mine"] == [
        100 + (r if r != rank else min({0, 1} - {rank})) for r in range(4)
    ]
    cluster.execute(SUM)


def test_a_rank_is_not_replaced_with_on_failure_stop() -> None:
    with Cluster(n=2, on_failure="stop") as cluster:
        with pytest.raises(UsageError, match="rank 1 cannot be replaced"):
            cluster.replace([1])
        assert cluster.died() == {}


def test_a_replacement_can_be_replaced(cluster: Cluster) -> None:
    for _ in range(2):
        kill(cluster, 2)
        cluster.execute(SUM, timeout_s=30)


def test_shrink_renumbers_the_survivors_in_their_old_order() -> None:
    with Cluster(n=4, on_failure="shrink") as cluster:
        cluster.execute("import os; mine = 100 + rank")
        kill(cluster, 1)
        assert cluster.size == 3
        cluster.execute(SUM, timeout_s=30)
        assert cluster["mine"] == [100, 102, 103]


def test_with_on_failure_stop_the_survivors_can_be_inspected() -> None:
    with Cluster(n=3, on_failure="stop") as cluster:
        cluster.execute("mine = 100 + rank")
        kill(cluster, 1)
        with pytest.raises(RankDied, match=r"rank 1 .* SIGKILL"):
            cluster.execute("1")
        assert cluster.pull("mine", [0, 2]) == [100, 102]


def test_scaling_keeps_processes_and_variables(cluster: Cluster) -> None:
    before = pids(cluster)
    cluster.execute("only = 1", ranks=[3])
    with pytest.raises(UsageError, match="--yes"):
        cluster.scale(2)
    assert pids(cluster) == before
    assert "2 ranks" in cluster.scale(2, drop=True)
    assert pids(cluster) == before[:2]
    cluster.execute(SUM, timeout_s=30)
    assert "5 ranks" in cluster.scale(5)
    assert pids(cluster)[:2] == before[:2]
    cluster.execute(SUM, timeout_s=30)
    assert cluster["mine"] == [100, 101, 100, 100, 100]


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_an_invalid_size_is_refused(cluster: Cluster, n: object) -> None:
    with pytest.raises(UsageError, match="whole number"):
        cluster.scale(n)  # type: ignore[arg-type]
    cluster.execute(SUM, timeout_s=30)


@pytest.mark.not_forked
@pytest.mark.parametrize(
    ("death", "ending"),
    [
        ("os._exit(3)", "exit code 3"),
        ("os.kill(os.getppid(), 9); time.sleep(600)", "an unknown exit code"),
    ],
    ids=["by itself", "with its parent"],
)
def test_a_new_rank_that_dies_while_it_joins_is_named_and_abandoned(
    death: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys, time\nif '--join' in sys.orig_argv:\n"
        f"    print('no room', file=sys.stderr, flush=True); {death}\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    notes: list[str] = []
    with Cluster(n=3, timeout_s=3600) as cluster:  # nothing may wait for so long
        cluster.on_note = notes.append
        cluster.execute("import os; mine = 100 + rank")
        os.kill(cluster.ranks[1].pid, signal.SIGKILL)
        wait_until(lambda: 1 in cluster.died())
        cluster.execute(SUM)
        assert cluster["mine"] == [100, 102]
    for part in (
        "rank 1 could not be replaced and was dropped",
        f"new rank 1 ended with {ending}",
        "no room",
        "%dist_scale -n 3 tries again",
    ):
        assert part in notes[0]


def test_restart_runs_the_setup_cells_again(cluster: Cluster) -> None:
    before = pids(cluster)
    cluster.restart()
    assert not set(before) & set(pids(cluster))
    cluster.execute(SUM, timeout_s=30)  # needs `os`, which the setup cell imports
    with pytest.raises(nbdist.TransferError, match="mine"):
        cluster.pull("mine")
