"""Clusters that outlive the process that has started them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import nbdist
from nbdist import Cluster, KeptCluster
from nbdist.clusters.futures import CallFuture
from nbdist.clusters.kept import directory
from nbdist.clusters.kept.clusters import kept_clusters, stop_cluster, visit
from nbdist.clusters.kept.messages import Cell, connected
from nbdist.clusters.kept.server import MOST_SILENT
from nbdist.clusters.observer import Event
from nbdist.clusters.result import CellResult
from nbdist.errors import (
    AlreadyRunning,
    CellError,
    CellInterrupted,
    CellTimeout,
    ClusterError,
    NbdistError,
    NotRunning,
    UsageError,
)
from tests.debugger_sessions import debug_at_random, killing
from tests.processes import Footprint, runs, wait_until
from tests.scripted_user import Answer, Scripted, end_of_input, press

PACKAGE = Path(nbdist.__file__).parents[1]
DEADLINE_S = 30.0
SHOWN = """
class Shown:
    def take(self, event): print(event.rank, flush=True)
    def due(self): return None
    def notice(self, text): pass
    def make_room(self): pass
"""
"""An observer that prints the rank of each event."""


@pytest.fixture(scope="module", autouse=True)
def _names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Names of clusters apart from those of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(scope="module")
def _kept() -> Iterator[str]:
    """The name of a cluster of two ranks that the tests of this module share."""
    KeptCluster(2, device="cpu", name="shared").start().detach()
    yield "shared"
    with contextlib.suppress(NotRunning):
        stop_cluster("shared")


@pytest.fixture
def kept(_kept: str) -> Iterator[KeptCluster]:
    """The shared cluster, attached, with two idle ranks after the test."""
    cluster = nbdist.attach(_kept)
    yield cluster
    cluster.detach()
    cluster = nbdist.attach(_kept, force=True)
    for cell in cluster.unseen_cells:
        cluster.interrupt()
        with contextlib.suppress(CellError):
            cluster.in_background(lambda c=cell: cluster.follow(c), "").result(
                DEADLINE_S
            )
    cluster.repair()
    states = cluster.status()
    doing = {rank: state and state["what"] for rank, state in states.items()}
    assert doing == {0: None, 1: None}
    cluster.detach()


def follow(cluster: KeptCluster, cell: Cell) -> CallFuture[CellResult]:
    """Follow a cell in the background."""
    return cluster.in_background(lambda: cluster.follow(cell), f"In[{cell.number}]")


class Lines:
    """Collects what rank 0 prints."""

    def __init__(self) -> None:
        self.text = ""
        self.has_printed = threading.Event()

    def take(self, event: Event) -> None:
        if event.rank == 0 and event.output is not None:
            self.text += event.output["content"]["text"]
            self.has_printed.set()

    def due(self) -> float | None:
        return None

    def notice(self, text: str) -> None:
        pass

    def make_room(self) -> None:
        pass


class Notebook:
    """Another process that attaches and runs code, like a notebook's kernel."""

    def __init__(self, name: str, code: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import nbdist as n\nc = n.attach({name!r})\n{code}",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )

    def await_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def counting(count: int, pause_s: float = 0.01) -> str:
    """A cell that prints numbers."""
    return (
        f"import time\nfor i in range({count}):\n"
        f"    print(i, flush=True); time.sleep({pause_s})"
    )


def numbers(count: int) -> str:
    return "".join(f"{i}\n" for i in range(count))


# -- the calls of a cluster ------------------------------------------------------------


INHERITED = {
    "background_calls", "compare", "complete", "debug", "describe", "execute",
    "in_background", "inspect", "look", "memory", "metrics", "monitor", "on",
    "output_folder", "profiling", "pull", "push", "refused", "run", "run_cell", "shown",
    "stacks", "status", "variables",
}  # fmt: skip
"""The methods that make other calls of the cluster only. Each is tried below."""


def test_every_method_of_a_cluster_is_the_servers_or_made_of_those():
    public = {name for name in vars(Cluster) if not name.startswith("_")}
    assert public - vars(KeptCluster).keys() == INHERITED


def test_cells_and_values(kept: KeptCluster):
    assert repr(kept) == "<nbdist.KeptCluster 'shared' of 2 ranks, attached>"
    result = kept.execute("x = 10 * (rank + 1)\nprint('here', rank)\nx")
    assert result[1].stdout == "here 1\n"
    assert result[0].outputs == [{"text/plain": "10"}]
    kept.push(y=[1, 2])
    kept["z"] = b"0" * (2 << 20)
    assert kept.pull("x + len(z)") == [10 + (2 << 20), 20 + (2 << 20)]
    assert kept["y"] == [[1, 2], [1, 2]]
    offset = 5
    assert kept.run(lambda a: a + offset, 4) == [9, 9]
    assert kept.on(1).run(os.getpid) == [kept.infos[1].pid]
    assert kept.run(os.getpid, wait=False).result(DEADLINE_S) == [
        info.pid for info in kept.ranks
    ]
    assert kept.inspect("x") == {0: "10", 1: "20"}
    assert kept.size == 2
    assert kept.died() == {}
    assert kept.running


def test_a_cell_and_the_monitor_are_shown(
    kept: KeptCluster, capsys: pytest.CaptureFixture[str]
):
    kept.run_cell("nbdist.log(shown=3.0)\nprint('said', rank)", [1])
    assert "said 1" in capsys.readouterr().out
    with contextlib.closing(kept.monitor("shown")) as monitor:
        assert monitor.metrics == ["shown"]


def test_looks(kept: KeptCluster):
    kept.execute("import nbdist, torch\nlist_of_numbers = [1, 2]\nnbdist.barrier()")
    assert kept.stacks() == {0: "  idle", 1: "  idle"}
    assert kept.status()[0]["what"] is None  # type: ignore[index]
    found = kept.variables("list_*")
    assert [each.name for each in found[1] or []] == ["list_of_numbers"]
    assert kept.complete("list_of", "list_of", 7) == ["list_of_numbers"]
    assert "text/plain" in kept.describe("torch.zeros")
    assert kept.memory()[0] is not None
    look = kept.look("list_of_numbers")
    assert look[0] is not None
    assert look[0].text == "[1, 2]"
    (leaf,) = kept.compare("list_of_numbers").leaves
    assert leaf.groups == ((0, 1),)
    assert "barrier" in repr(kept.collectives())
    assert kept.refused(kept.status()) == 0
    assert kept.output_folder.name == "output"
    assert {setting.name for setting in kept.settings()} >= {"n", "device"}
    assert kept.fault_tolerant
    assert "Open MPI" in kept.mpi
    assert kept.background_calls == []
    kept.interrupt()


def test_logged_values_are_here_when_a_cell_has_ended(kept: KeptCluster):
    kept.execute("import nbdist\nnbdist.log(step=3, height=float(rank))")
    assert kept.collector.history("height")[1][1][0] == 1.0
    kept.detach()
    again = nbdist.attach("shared")
    assert again.collector.history("height")[1][1][0] == 1.0
    again.execute("nbdist.log(step=4, height=7.0)")
    assert list(again.collector.history("height")[0][1]) == [0.0, 7.0]
    again.detach()


def test_a_profile_of_a_cell(kept: KeptCluster):
    with kept.profiling() as profile:
        kept.execute("import torch\ntorch.randn(64, 64) @ torch.randn(64, 64)")
    assert profile.ranks


def test_errors_are_those_of_a_cluster(kept: KeptCluster):
    with pytest.raises(CellError, match="ZeroDivisionError") as caught:
        kept.execute("1 / rank")
    assert caught.value.result[1].ok
    assert "In[1] line 1" in "".join(caught.value.rendered)
    with pytest.raises(CellError, match="ValueError: no"):
        kept.run(fails)
    with pytest.raises(CellTimeout, match=r"0\.5 s"):
        kept.execute("import time; time.sleep(60)", timeout_s=0.5)
    with pytest.raises(UsageError, match="rank 7"):
        kept.execute("1", ranks=[7])
    assert kept.failed_rank is not None


def fails() -> None:
    raise ValueError("no")


def test_an_interrupt_reaches_the_ranks(kept: KeptCluster):
    lines = Lines()
    main = threading.main_thread().ident
    assert main is not None

    def press() -> None:
        assert lines.has_printed.wait(DEADLINE_S)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(CellInterrupted, match="keep their variables"):
        kept.execute("kept_value = 3\n" + counting(10**6), observer=lines)
    thread.join()
    assert kept.pull("kept_value") == [3, 3]
    future = kept.execute(counting(10**6), wait=False)
    wait_until(lambda: future.running(), DEADLINE_S)
    future.interrupt()
    with pytest.raises(CellInterrupted):
        future.result(DEADLINE_S)
    assert kept.collector.marks[-1].kind == "interrupted"


# -- prompts of ranks ------------------------------------------------------------------

STOPS = """
def work(x):
    y = x + 1
    breakpoint()
    return y
if rank == 1:
    print("result", work(rank))
nbdist.barrier()
"""


@pytest.fixture
def user(kept: KeptCluster) -> Scripted:
    """Answers for the user of the notebook that is attached."""
    kept.reader = reader = Scripted()
    return reader


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_in_its_post_mortem_is_replaced(
    kept: KeptCluster, user: Scripted, rank: int
):
    with pytest.raises(CellError, match="ZeroDivisionError"):
        kept.execute(f"1 / (rank - {rank})")
    before = {info.rank: info.pid for info in kept.infos}
    user.give("p rank", killing(kept, user))
    with pytest.raises(CellError, match=f"rank {rank} .*SIGKILL"):
        kept.debug()
    after = {info.rank: info.pid for info in kept.infos}
    assert {r for r in after if after[r] != before[r]} == {rank}
    assert kept.run(lambda: 1) == [1, 1]


def test_a_debugger_on_a_rank_asks_in_the_notebook(kept: KeptCluster, user: Scripted):
    user.give("p y * 100", "n", "c")
    result = kept.execute(STOPS, number=3)
    assert result[1].stdout == "result 2\n"
    assert user.prompts == ["[1] (Pdb) "] * 3
    assert user.seen[0].startswith("debugger on rank 1 of 2 (")
    assert {"[1] 200", "[1] -> return y"} <= {*user.seen}
    user.give("ada", "bob")
    result = kept.execute("print('hello', input('name? '))")
    assert [each.stdout for each in result] == ["hello ada\n", "hello bob\n"]
    user.give("secret")
    kept.execute("import getpass; getpass.getpass('word? ')", [0])
    assert user.prompts == ["[0] word? (hidden)"]


def test_the_time_at_a_prompt_does_not_count(kept: KeptCluster, user: Scripted):
    def slowly() -> str:
        time.sleep(2)
        return "c"

    user.give(slowly)
    kept.execute("if rank: breakpoint()\nnbdist.barrier()", timeout_s=1.5)
    user.give(slowly)
    assert kept.run(_asks, timeout_s=1.5) == ["c", ""]


def _asks() -> str:
    return input("? ") if nbdist.rank() == 0 else ""


@pytest.mark.parametrize("how", ["q", press, end_of_input], ids=["q", "button", "end"])
def test_quit_and_the_interrupt_button_free_all_ranks(
    kept: KeptCluster, user: Scripted, how: Answer
):
    user.give(how)
    with pytest.raises(CellInterrupted):
        kept.execute(STOPS)
    assert kept["rank"] == [0, 1]


def test_the_death_of_a_rank_ends_its_prompt(kept: KeptCluster, user: Scripted):
    def kill() -> str:
        os.kill(kept.ranks[1].pid, signal.SIGKILL)
        time.sleep(60)
        return ""

    user.give(kill)
    with pytest.raises(CellError, match="rank 1 of 2: RankDied"):
        kept.execute(STOPS)
    assert kept["rank"] == [0, 1]


def test_a_post_mortem_asks_in_the_notebook(kept: KeptCluster, user: Scripted):
    with pytest.raises(CellError, match="ZeroDivisionError"):
        kept.execute("def f(x):\n    return x / (rank - 1)\nf(4)")
    user.give("p x", "q")
    kept.debug()
    assert "[1] 4" in user.seen


AT_PROMPT = """
class Waiting:
    refusal = ""
    def show(self, text): pass
    def read(self, prompt, *, hidden=False):
        print(prompt, flush=True)
        import time; time.sleep(60)
    def interrupt_read(self): pass
c.reader = Waiting()
c.execute({code!r}, number=7)
"""


def test_a_rank_at_a_prompt_goes_on_when_its_notebook_is_killed(kept: KeptCluster):
    kept.detach()
    notebook = Notebook("shared", AT_PROMPT.format(code=STOPS + counting(3)))
    assert notebook.await_line() == "[1] (Pdb) \n"
    notebook.kill()
    again = nbdist.attach("shared", force=True)
    (cell,) = again.unseen_cells
    result = follow(again, cell).result(DEADLINE_S)
    assert result[1].stdout == "result 2\n" + numbers(3)
    again.detach()


def test_while_nobody_is_attached_a_breakpoint_is_passed_and_input_is_an_error(
    kept: KeptCluster, tmp_path: Path
):
    go_on = tmp_path / "go on"
    wait = f"while not os.path.exists({str(go_on)!r}): time.sleep(0.05)"
    code = f"import os, time\n{wait}\nbreakpoint()\nprint('passed')\ninput('? ')"
    kept.execute(code, wait=False)
    wait_until(lambda: kept.stacks()[0] != "  idle", DEADLINE_S)
    kept.detach()
    go_on.touch()
    wait_until(lambda: not nbdist.kept_clusters()[0].doing, DEADLINE_S)
    again = nbdist.attach("shared")
    again.reader = reader = Scripted()
    (cell,) = again.unseen_cells
    with pytest.raises(CellError, match="NoInput") as ended:
        again.follow(cell)
    assert ended.value.result[0].stdout == "passed\n"
    assert "no notebook is attached" in reader.text
    again.detach()


# -- attaching -------------------------------------------------------------------------


def test_a_cell_goes_on_when_its_notebook_is_killed(kept: KeptCluster):
    kept.execute("mine = rank")
    kept.detach()
    other = Notebook(
        "shared",
        f"{SHOWN}c.execute({counting(150)!r}, number=7, observer=Shown())\n",
    )
    other.await_line()
    other.kill()
    again = nbdist.attach("shared")
    (cell,) = again.unseen_cells
    assert (cell.number, cell.ranks) == (7, (0, 1))
    lines = Lines()
    result = again.follow(cell, lines)
    assert lines.text == result[1].stdout == numbers(150)
    assert again.pull("mine") == [0, 1]
    again.detach()
    assert nbdist.attach("shared", force=True).unseen_cells == ()


def test_a_killed_notebook_is_not_attached_any_more(kept: KeptCluster):
    """Even if a child of its process has its connection open."""
    kept.detach()
    other = Notebook(
        "shared",
        "import os, time\nchild = os.fork()\nif child == 0: time.sleep(600)\n"
        "print(child, flush=True)\ntime.sleep(600)\n",
    )
    child = int(other.await_line())
    try:
        other.process.kill()
        other.process.wait()
        nbdist.attach("shared").detach()
    finally:
        os.kill(child, signal.SIGKILL)
        other.process.communicate()


def test_a_cell_that_has_ended_meanwhile_is_shown_with_its_error(kept: KeptCluster):
    future = kept.execute("print('before')\n1 / 0", number=3, wait=False)
    with pytest.raises(CellError):
        future.result(DEADLINE_S)
    kept.execute(counting(10**6), wait=False)
    wait_until(lambda: kept.stacks()[0] != "  idle", DEADLINE_S)
    kept.detach()
    again = nbdist.attach("shared")
    (cell,) = again.unseen_cells
    with pytest.raises(ClusterError):
        nbdist.attach("shared")
    taken = nbdist.attach("shared", force=True)
    with pytest.raises(ClusterError, match="attached by force"):
        again.pull("1")
    following = follow(taken, cell)
    wait_until(following.running, DEADLINE_S)
    following.interrupt()
    with pytest.raises(CellInterrupted):
        following.result(DEADLINE_S)
    taken.detach()


def test_a_notebook_that_has_detached_may_attach_at_once(kept: KeptCluster):
    kept.detach()
    for _ in range(30):
        nbdist.attach("shared").detach()
    assert nbdist.attach("shared")["rank"] == [0, 1]


def test_one_notebook_at_a_time(kept: KeptCluster):
    with pytest.raises(AlreadyRunning, match=f"process {os.getpid()} is attached"):
        nbdist.attach("shared")
    (described,) = nbdist.kept_clusters()
    assert described.holder is not None
    assert described.holder.pid == os.getpid()
    assert (described.name, described.size, described.ends) == ("shared", 2, None)
    kept.detach()
    (described,) = nbdist.kept_clusters()
    assert described.holder is None
    assert described.ends is not None
    with pytest.raises(NotRunning, match="no cluster is attached"):
        kept.execute("1")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_meanwhile_is_replaced(kept: KeptCluster, rank: int):
    kept.execute("mine = 5")
    pid = kept.infos[rank].pid
    kept.detach()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: nbdist.kept_clusters()[0].died == (rank,), DEADLINE_S)
    again = nbdist.attach("shared")
    notes: list[str] = []
    again.on_note = notes.append
    again.execute("total = torch.ones(1)\nnbdist.all_reduce(total)")
    kinds = [mark.kind for mark in again.collector.marks]
    assert kinds[-2:] == ["lost", "replaced"]
    assert again.pull("total.item()") == [2.0, 2.0]
    assert again.pull("mine", ranks=[1 - rank]) == [5]
    assert f"rank {rank}" in "".join([*again.notes, *notes])
    assert again.infos[rank].pid != pid
    again.detach()


def test_a_stopped_notebook_does_not_delay_the_ranks(kept: KeptCluster):
    kept.detach()
    count = 10_000
    code = f"for i in range({count}): print(i, flush=True)"
    other = Notebook("shared", f"{SHOWN}c.execute({code!r}, observer=Shown())\n")
    other.await_line()
    other.process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: nbdist.kept_clusters()[0].doing == "", DEADLINE_S)
        again = nbdist.attach("shared", force=True)
        (cell,) = again.unseen_cells
        assert again.follow(cell)[0].stdout == numbers(count)
        again.detach()
    finally:
        other.kill()


# -- names, starts and ends ------------------------------------------------------------


@pytest.mark.usefixtures("_kept")
def test_names_are_checked_before_anything_is_started():
    with pytest.raises(UsageError, match="has this name already"):
        KeptCluster(2, name="shared")
    with pytest.raises(UsageError, match="expected letters"):
        KeptCluster(2, name="../x")
    with pytest.raises(UsageError, match="expected hours above 0"):
        KeptCluster(2, hours=0)
    with pytest.raises(UsageError, match="did you mean"):
        KeptCluster(2, devise="cpu")
    with pytest.raises(NotRunning, match="no kept cluster is named nothing; running"):
        nbdist.attach("nothing")


def test_a_name_is_that_of_the_notebook(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(directory.SESSION_NAME, "/notes/My notebook.ipynb")
    with contextlib.ExitStack() as started:
        names = []
        for _ in range(2):
            cluster = KeptCluster(1, device="cpu").start()
            started.callback(cluster.stop)
            names.append(cluster.name)
            cluster.detach()
        with pytest.raises(UsageError, match="several clusters are kept"):
            nbdist.attach()
        started.pop_all()
    assert names == ["My-notebook", "My-notebook-2"]
    for name in names:
        stop_cluster(name)
    with pytest.raises(NotRunning, match="no kept cluster is running"):
        nbdist.attach()


def footprint(cluster: KeptCluster) -> Footprint:
    """The processes and files of a cluster."""
    entry = directory.find(cluster.name)
    assert entry is not None
    folders = [Path(entry.folder), cluster.output_folder.parent]
    return Footprint([cluster.description.pid], *folders)


def test_a_cluster_ends_when_nobody_was_attached_for_its_hours():
    cluster = KeptCluster(2, device="cpu", hours=1 / 3600, name="short").start()
    left = footprint(cluster)
    cluster.execute(counting(150))  # longer than its hours, but it is attached
    assert cluster.running
    cluster.detach()
    left.assert_gone()
    assert directory.find("short") is None


@pytest.mark.parametrize("way", ["stop", "by name", "kill"])
def test_nothing_is_left(way: str):
    cluster = KeptCluster(2, device="cpu", name="ending").start()
    notes: list[str] = []
    cluster.on_note = notes.append
    left = footprint(cluster)
    future = cluster.execute(counting(10**6), wait=False)
    wait_until(lambda: cluster.stacks()[0] != "  idle", DEADLINE_S)
    if way == "stop":
        cluster.stop()
        cluster.stop()
    elif way == "by name":
        stop_cluster("ending")
    else:
        os.kill(cluster.description.pid, signal.SIGKILL)
    with pytest.raises(Exception, match=r"end|stopped|detached"):
        future.result(DEADLINE_S)
    left.processes = {each for each in left.processes if each.pid != os.getpid()}
    assert directory.find("ending") is None
    left.assert_gone()
    assert not cluster.running
    if way == "kill":
        assert "has ended, and all ranks with it" in "".join(notes)
    cluster.stop()


def is_server(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # another test's, which has ended
        return "nbdist.clusters.kept.server" in process.cmdline()
    return False


def test_an_interrupted_start_leaves_nothing():
    main = threading.main_thread().ident
    assert main is not None
    pressed = threading.Event()
    servers: list[psutil.Process] = []

    def press(progress: object) -> None:
        if not pressed.is_set():
            pressed.set()
            children = psutil.Process().children()
            servers.extend(each for each in children if is_server(each))
            signal.pthread_kill(main, signal.SIGINT)

    cluster = KeptCluster(2, device="cpu", name="interrupted")
    with pytest.raises(CellInterrupted, match="start was interrupted"):
        cluster.start(press)
    assert pressed.is_set()
    wait_until(lambda: not any(map(runs, servers)), DEADLINE_S)
    assert directory.find("interrupted") is None


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NBDIST_PRELOAD", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "none")
    cluster = KeptCluster(2, device="cpu", name="failing", timeout_s=0.2)
    with pytest.raises(ClusterError, match="ranks were up after"):
        cluster.start()
    assert directory.find("failing") is None


def test_restart_scale_and_replace(kept: KeptCluster):
    kept.execute("made_by_setup = rank", setup=True)
    kept.replace([1])
    assert kept.pull("made_by_setup") == [0, 0]  # those of the lowest rank
    assert "3 ranks" in kept.scale(3)
    assert kept.size == 3
    assert [info.rank for info in kept.infos] == [0, 1, 2]
    assert "2" in kept.scale(2)
    pids = [info.pid for info in kept.infos]
    kept.restart()
    assert kept.size == 2
    assert {info.pid for info in kept.infos}.isdisjoint(pids)
    assert kept.pull("made_by_setup") == [0, 1]


@pytest.mark.slow
def test_no_session_of_a_debugger_leaves_a_rank_waiting():
    with KeptCluster(3, device="cpu", name="debugged") as cluster:
        cluster.reader = reader = Scripted()
        try:
            debug_at_random(cluster, reader, 100)
        finally:
            cluster.stop()


def test_silent_connections_take_nothing_from_a_notebook(kept: KeptCluster):
    """There may be more of them than the server may have descriptors."""
    folder = Path(directory.find(kept.name).folder)
    silent = [connected(folder) for _ in range(3 * MOST_SILENT)]
    oldest = silent[0]
    assert oldest.poll(DEADLINE_S), "the server ends the oldest"
    with pytest.raises((EOFError, OSError)):
        oldest.recv()
    assert kept["rank"] == [0, 1]
    kept.detach()
    assert [c.size for c in kept_clusters() if c.name == kept.name] == [2]
    nbdist.attach(kept.name).detach()
    for each in silent:
        each.close()


def test_a_cell_that_another_notebook_has_seen_is_an_error_and_no_more(
    kept: KeptCluster,
):
    gone = Cell(key=12345, number=5, ranks=(0, 1), code="x = 1")
    with pytest.raises(ClusterError, match="another notebook has seen the end"):
        follow(kept, gone).result(DEADLINE_S)
    assert kept["rank"] == [0, 1]


# -- what visitors look at -------------------------------------------------------------

WAITING = """
import os, time
class Holder:
    @property
    def waits(self):
        open(f"{folder}/began-{rank}", "w").close()
        while not os.path.exists(f"{folder}/released"): time.sleep(0.01)
        return 5
h = Holder()
"""


@contextlib.contextmanager
def visiting(kept: KeptCluster, folder: Path, how: str) -> Iterator[CallFuture[object]]:
    """A visitor's look at what waits until the block ends."""
    kept.execute(f"folder = {str(folder)!r}\n{WAITING}")
    future: CallFuture[object] = CallFuture()

    def look() -> None:
        try:
            with visit(kept.name) as visitor:
                future.set_result(getattr(visitor, how)("h.waits"))
        except NbdistError as error:
            future.set_exception(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        wait_until(lambda: len(list(folder.glob("began-*"))) == 2, DEADLINE_S)
        yield future
    finally:
        (folder / "released").touch()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("how", ["look", "compare"])
def test_no_cell_waits_for_what_a_visitor_looks_at(
    kept: KeptCluster, tmp_path: Path, how: str
):
    with visiting(kept, tmp_path, how):
        cell = kept.in_background(lambda: kept.execute("x = 5"), "In[1]")
        cell.result(DEADLINE_S)
        assert not (tmp_path / "released").exists()


def test_a_cell_that_waits_for_a_visitor_says_so_and_an_interrupt_ends_both(
    kept: KeptCluster, tmp_path: Path
):
    notes: list[str] = []
    kept.on_note = notes.append
    with visiting(kept, tmp_path, "pull") as pulled:
        cell = kept.in_background(lambda: kept.execute("x = 5"), "In[1]")
        wait_until(lambda: bool(notes), DEADLINE_S)
        assert f"waits for pull h.waits of process {os.getpid()}" in notes[0]
        cell.interrupt()
        with pytest.raises(CellInterrupted, match=r"it waited for pull h\.waits"):
            cell.result(DEADLINE_S)
        with pytest.raises(CellInterrupted):
            pulled.result(DEADLINE_S)
    kept.execute("x = 6")


def test_a_pull_with_a_time_limit_does_not_wait_longer_for_a_visitor(
    kept: KeptCluster, tmp_path: Path
):
    with visiting(kept, tmp_path, "pull"):
        pull = kept.in_background(lambda: kept.pull("h", timeout_s=0.5), "pull")
        with pytest.raises(CellTimeout, match=r"did not begin within 0\.5 s"):
            pull.result(DEADLINE_S)


def test_a_rank_in_which_a_visitor_waits_is_replaced(kept: KeptCluster, tmp_path: Path):
    before = [info.pid for info in kept.infos]
    with visiting(kept, tmp_path, "pull") as pulled:
        kept.in_background(lambda: kept.replace([1]), "replace").result(DEADLINE_S)
        with pytest.raises(NbdistError):
            pulled.result(DEADLINE_S)
    after = [info.pid for info in kept.infos]
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_visitor_that_leaves_ends_its_look(kept: KeptCluster, tmp_path: Path):
    kept.execute(f"folder = {str(tmp_path)!r}\n{WAITING}")
    with visit(kept.name) as visitor:
        visitor.in_background(lambda: visitor.pull("h.waits"), "pull")
        wait_until(lambda: len(list(tmp_path.glob("began-*"))) == 2, DEADLINE_S)
    kept.in_background(lambda: kept.execute("x = 5"), "").result(DEADLINE_S)
