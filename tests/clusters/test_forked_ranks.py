"""Forked ranks have the state of started ranks, and end with their cluster."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbdist import Cluster, lazy, load_ipython_extension
from nbdist.clusters import fork_server_client
from nbdist.clusters.launchers.mpiexec import library_of_wheel
from nbdist.clusters.startup import Progress
from nbdist.clusters.supervisor_client import SupervisorClient
from nbdist.errors import CellError, StartError
from nbdist.ipc.fork_messages import FORKED, SWITCHED_OFF
from nbdist.session import Session
from tests.cluster_processes import ClusterProcesses, fork_server
from tests.clusters.process_state import (
    open_files,
    random_states,
    seeded_draws,
    state,
    threads_of_pools,
)
from tests.processes import Footprint, Program, runs, wait_until
from tests.seed import drawn, some_or_all

MPICH = shutil.which("mpiexec.mpich")
SUM = "x = torch.ones(1); nbdist.all_reduce(x); assert x == world_size"


@pytest.fixture(scope="module", autouse=True)
def _forks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NBDIST_PRELOAD", raising=False)
        fork_server_client.close()
        yield
    fork_server_client.close()


def started(cluster: Cluster) -> list[str]:
    return [info.started for info in cluster.infos]


def server_pid() -> int:
    server = fork_server()
    assert server is not None
    return server.pid


def rank_host(cluster: Cluster) -> psutil.Process:
    """The parent of a cluster's ranks."""
    host = ClusterProcesses.of(cluster).rank_host
    assert {psutil.Process(info.pid).parent() for info in cluster.infos} == {host}
    assert host is not None
    return host


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with Cluster(2, device="cpu", threads=2, oversubscribe=True) as cluster:
        assert started(cluster) == [FORKED, FORKED]
        yield cluster


@pytest.fixture(scope="module")
def alone(two: Cluster) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBDIST_PRELOAD", "0")
        cluster = Cluster(2, device="cpu", threads=2, oversubscribe=True).start()
    with cluster:
        assert started(cluster) == [SWITCHED_OFF] * 2
        yield cluster


# -- what a rank has ---------------------------------------------------------------


def test_a_forked_rank_has_the_same_state_as_a_started_rank(
    two: Cluster, alone: Cluster
) -> None:
    forked, plain = two.run(state)[0], alone.run(state)[0]
    # The server's switch itself is in the environment of one of them.
    plain["names of other variables"].remove("NBDIST_PRELOAD")
    assert forked.keys() == plain.keys()
    for found in (forked, plain):
        found["warning filters"].sort()  # they come in the order of the imports
    different = {
        name: (forked[name], plain[name])
        for name in plain
        if forked[name] != plain[name]
    }
    assert different == {}


def test_a_forked_rank_has_the_folder_umask_limits_and_cores_of_its_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    cores = os.sched_getaffinity(0)
    monkeypatch.chdir(tmp_path)
    mask = os.umask(0o027)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    os.sched_setaffinity(0, {min(cores)})
    try:
        with Cluster(1, device="cpu") as cluster:
            assert started(cluster) == [FORKED]
            (found,) = cluster.run(state)
    finally:
        os.umask(mask)
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
        os.sched_setaffinity(0, cores)
    assert found["umask"] == 0o027
    assert found["working folder"] == str(tmp_path)
    assert (0, hard) in found["limits"]
    assert found["cores"] == [min(cores)]


def kinds(opened: dict[int, str]) -> set[str]:
    """The targets of open descriptors, without numbers and names of the process."""
    return {re.sub(r"/nbdist-\w+|\d+", "", target) for target in opened.values()}


def targets(pid: int) -> set[str]:
    """The targets of a process's open descriptors. It may be opening and closing."""
    found = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found


def test_no_descriptor_of_the_fork_server_is_open_in_a_rank(
    two: Cluster, alone: Cluster
) -> None:
    host = rank_host(two).pid
    of_servers = targets(host) | targets(server_pid())
    of_servers -= {"/dev/null", "anon_inode:[eventpoll]", "anon_inode:[pidfd]"}
    # Each process maps it for callbacks, by the number that libffi remembers.
    of_servers = {each for each in of_servers if "/libffi" not in each}
    forked, plain = two.run(open_files)[0], alone.run(open_files)[0]
    assert not set(forked.values()) & of_servers
    assert kinds(forked) == kinds(plain)


def test_a_rank_has_its_descriptors_at_the_numbers_of_its_parent() -> None:
    program = (
        "import os\n"
        "from nbdist.ipc.fork_server import _renumber\n"
        "a, b = (os.memfd_create(name) for name in 'ab')\n"
        "other = os.memfd_create('other')\n"
        "_renumber({0: 0, 1: 1, 2: 2, a: b, b: a, 40: b})\n"
        "print([os.readlink(f'/proc/self/fd/{n}')[7:8] for n in (a, b, 40)])\n"
        "print(os.path.exists(f'/proc/self/fd/{other}'))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['b', 'a', 'b']", "False"]


def test_random_states_differ_unless_seeded(two: Cluster) -> None:
    drawn = list(two.run(random_states))
    with Cluster(1, device="cpu") as another:
        drawn += another.run(random_states)
    for states in zip(*drawn, strict=True):
        assert len(set(states)) == 3, states
    program = (
        "from tests.clusters.process_state import seeded_draws; print(seeded_draws())"
    )
    plain = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert [str(each) for each in two.run(seeded_draws)] == [plain.stdout.strip()] * 2


def test_thread_pools_have_the_number_of_threads_of_the_rank(
    two: Cluster, alone: Cluster
) -> None:
    assert two.run(threads_of_pools) == [(2, 2, 2, [2])] * 2
    assert alone.run(threads_of_pools) == [(2, 2, 2, [2])] * 2


def test_all_ranks_have_the_same_hash_seed(two: Cluster, alone: Cluster) -> None:
    hashes = [*two.run(hash, "a text"), *alone.run(hash, "a text")]
    assert len(set(hashes)) == 1


def test_no_lock_is_held_in_a_forked_rank(two: Cluster) -> None:
    """The processes that fork have one thread, so that no other can hold a lock."""
    for pid in (rank_host(two).pid, server_pid()):
        assert os.listdir(f"/proc/{pid}/task") == [str(pid)]


def test_ps_shows_the_rank_of_a_process(two: Cluster, alone: Cluster) -> None:
    for cluster in (two, alone):
        for info in cluster.infos:
            process = psutil.Process(info.pid)
            assert process.name() == f"nbdist rank {info.rank}"
            assert process.cmdline() == ["nbdist", "rank", str(info.rank)]
    host = " ".join(rank_host(two).cmdline())
    assert host == f"nbdist rank host of {ClusterProcesses.of(two).run_dir}"


def test_the_controller_is_forked_like_the_ranks(two: Cluster, alone: Cluster) -> None:
    controller = ClusterProcesses.of(two).helper("controller")
    plain = ClusterProcesses.of(alone).helper("controller")
    assert controller is not None
    assert plain is not None
    assert controller.parent() == rank_host(two)
    assert plain.parent() == ClusterProcesses.of(alone).supervisor
    assert controller.cwd() == plain.cwd()
    run_dir = ClusterProcesses.of(two).run_dir
    log = str(run_dir / "controller.log")
    targets = [os.readlink(f"/proc/{controller.pid}/fd/{n}") for n in range(3)]
    assert targets == ["/dev/null", log, log]
    assert " ".join(controller.cmdline()) == f"nbdist controller of {run_dir}"


# -- what works in a rank ----------------------------------------------------------


def test_workers_of_a_data_loader_run_in_a_forked_rank(two: Cluster) -> None:
    contexts = {"fork": [0, 1], "spawn": [0], "forkserver": [1]}  # two import torch
    for context, ranks in contexts.items():
        two.execute(
            f"""
            data = torch.utils.data.TensorDataset(torch.arange(8.0))
            loader = torch.utils.data.DataLoader(
                data, batch_size=2, num_workers=2, multiprocessing_context="{context}"
            )
            assert sum(float(x.sum()) for (x,) in loader) == 28
            """.replace("\n            ", "\n"),
            ranks,
            timeout_s=120,
        )


def test_mp_spawn_runs_in_a_forked_rank(two: Cluster, tmp_path: Path) -> None:
    (tmp_path / "spawned_work.py").write_text(
        "import os\ndef work(index, folder):\n"
        "    open(os.path.join(folder, f'{os.getpid()}.{index}'), 'w').close()\n"
    )
    two.execute(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import spawned_work, torch.multiprocessing as mp\n"
        f"mp.spawn(spawned_work.work, ({str(tmp_path)!r},), nprocs=2)",
        timeout_s=120,
    )
    assert sorted(path.suffix for path in tmp_path.glob("[0-9]*")) == [
        ".0", ".0", ".1", ".1",
    ]  # fmt: skip


def test_ctypes_makes_callbacks_after_the_fork_server_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "with_a_callback.py").write_text(
        "import ctypes\n"
        "Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)\n"
        "first = Callback(lambda i: i + 1)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NBDIST_PRELOAD", "with_a_callback")
    with Cluster(1, device="cpu") as cluster:
        assert started(cluster) == [FORKED]
        cluster.execute(
            "from with_a_callback import Callback, first\n"
            "more = [Callback(lambda i: i + 2) for _ in range(3000)]\n"
            "assert first(1) == 2\n"
            "assert sum(each(1) for each in more) == 9000"
        )


def test_openmp_mkl_and_openblas_run_in_a_forked_rank(two: Cluster) -> None:
    two.execute(
        "import numpy as np\n"
        "a = torch.rand(150, 150)\n"
        "assert torch.allclose(a @ a, torch.from_numpy(a.numpy() @ a.numpy()), 1e-3)\n"
        "assert abs(float(torch.ones(3_000_000).sum()) - 3e6) < 1\n"
        "torch.linalg.svd(a)\n"
        "np.linalg.svd(a.numpy())",
        timeout_s=120,
    )


@pytest.mark.slow
def test_torch_compile_runs_in_a_forked_rank(two: Cluster) -> None:
    two.execute(
        "f = torch.compile(lambda x: (x * 2 + 1).sum())\n"
        "assert float(f(torch.ones(1000))) == 3000",
        timeout_s=300,
    )


# -- ends --------------------------------------------------------------------------

START = """
import os, sys, time
from nbdist import Cluster
cluster = Cluster(n=2, device="cpu").start()
assert {info.started for info in cluster.infos} == {"forked"}
cluster.execute("import subprocess; subprocess.Popen(['sleep', '1000'])")
print(cluster._started.process_supervisor.run_dir, flush=True)
print(cluster.infos[0].pid, flush=True)
"""


@pytest.mark.parametrize("ending", ["killed", "stopped"])
def test_nothing_is_left_after_the_end_of_a_program(ending: str) -> None:
    rest = "sys.stdin.readline(); cluster.stop(); print('over', flush=True)\n"
    with Program(START + rest + "time.sleep(100)") as program:
        run_dir = Path(program.line())
        rank = psutil.Process(int(program.line()))
        host = rank.parent()
        assert host is not None
        server = host.parent()
        assert server is not None
        below = Footprint([host.pid], run_dir)
        assert len(below.processes) >= 5, "a host, two ranks and what they started"
        whole = Footprint([program.pid], run_dir)
        assert whole.processes > below.processes
        if ending == "stopped":
            program.tell("stop")
            assert program.line() == "over"
            below.assert_gone(within_s=0.1)
            assert server.is_running(), "it serves the next start"
        program.kill()
        whole.assert_gone()


def test_the_exit_code_of_a_forked_rank_is_reported() -> None:
    with (
        Cluster(2, device="cpu", on_failure="stop") as cluster,
        pytest.raises(CellError, match="exit code 7"),
    ):
        cluster.execute("import os\nif rank == 1: os._exit(7)\nnbdist.barrier()")
    with Cluster(2, device="cpu", on_failure="stop") as cluster:
        os.kill(cluster.infos[1].pid, signal.SIGSEGV)
        with pytest.raises(CellError, match="SIGSEGV"):
            cluster.execute("nbdist.barrier()")


def test_replaced_and_added_ranks_are_forked() -> None:
    with Cluster(2, device="cpu", threads=1) as cluster:
        os.kill(cluster.infos[1].pid, signal.SIGKILL)
        wait_until(lambda: bool(cluster.died()))
        cluster.execute(SUM)
        cluster.scale(3)
        cluster.execute(SUM)
        assert started(cluster) == [FORKED] * 3
        controller = ClusterProcesses.of(cluster).helper("controller")
        assert controller is not None
        assert {info.pid for info in cluster.infos} | {controller.pid} == {
            child.pid for child in rank_host(cluster).children()
        }
        cluster.restart()
        cluster.execute(SUM)
        assert started(cluster) == [FORKED] * 3


def test_killing_the_rank_host_ends_all_ranks(two: Cluster) -> None:
    with Cluster(2, device="cpu", threads=1) as cluster:
        cluster.execute("import subprocess; subprocess.Popen(['sleep', '1000'])")
        host = rank_host(cluster)
        footprint = Footprint([host.pid])
        assert len(footprint.processes) >= 5
        host.kill()
        footprint.assert_gone()
        cluster.execute(SUM)
        assert started(cluster) == [FORKED] * 2


def test_killing_the_fork_server_ends_no_rank() -> None:
    with Cluster(2, device="cpu", threads=1) as cluster:
        before = server_pid()
        os.kill(before, signal.SIGKILL)
        cluster.execute(SUM)
        os.kill(cluster.infos[1].pid, signal.SIGKILL)
        wait_until(lambda: bool(cluster.died()))
        cluster.execute(SUM)
        assert started(cluster) == [FORKED] * 2
        footprint = Footprint([rank_host(cluster).pid])
        cluster.restart()
        footprint.assert_gone()
        assert started(cluster) == [FORKED] * 2
        assert server_pid() != before


def test_a_rank_host_that_is_killed_during_a_start_is_named() -> None:
    def kill(progress: Progress) -> None:
        if progress.stages:
            for process in psutil.Process(server_pid()).children():
                process.kill()

    # A rank ends with its host, and may be seen first.
    named = r"(rank host|rank . of 2 on .*) ended with SIGKILL"
    with pytest.raises(StartError, match=named) as failed:
        Cluster(2, device="cpu").start(kill)
    assert failed.value.died


@pytest.mark.parametrize("when", ["before", "after", "importing"])
def test_a_stopped_fork_server_does_not_delay_a_start(when: str) -> None:
    if when == "importing":
        fork_server_client.close()
        fork_server_client.prepare(os.environ)
    cluster = Cluster(1, device="cpu")
    stopped = psutil.Process(server_pid())

    def stop(progress: Progress) -> None:
        if not progress.ready and stopped.status() != psutil.STATUS_STOPPED:
            stopped.suspend()

    if when == "before":
        stopped.suspend()
    with cluster.start(stop if when != "before" else lambda _: None):
        # A rank that its parent starts by itself, after 60 s, is not forked.
        assert started(cluster) == [FORKED]
    stopped.resume()


def test_a_fork_server_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server_client, "ANSWER_TIMEOUT_S", 0.2)
    fork_server_client.prepare(os.environ)
    assert fork_server_client.await_ready(60)
    hanging = psutil.Process(server_pid())
    monkeypatch.setattr(signal, "SIGCONT", 0)  # it is not continued
    hanging.suspend()
    with Cluster(1, device="cpu") as cluster:
        assert started(cluster) == [FORKED]
        assert server_pid() != hanging.pid
    assert not runs(hanging)


@pytest.mark.parametrize(
    "is_ready", [True, pytest.param(False, marks=pytest.mark.not_forked)]
)
def test_killing_the_fork_server_during_a_start_ends_no_rank(
    is_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_server_client.close()
    if is_ready:
        fork_server_client.prepare(os.environ)
        assert fork_server_client.await_ready(60)
    attend = SupervisorClient.attend_rank_host

    def killed(client: SupervisorClient, path: Path, server: int) -> None:
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not runs(psutil.Process(server)))
        attend(client, path, server)

    with monkeypatch.context() as patch:
        patch.setattr(SupervisorClient, "attend_rank_host", killed)
        cluster = Cluster(2, device="cpu").start()
    with cluster:
        cluster.execute(SUM)
        ways = started(cluster)
    if is_ready:
        assert ways == [FORKED] * 2, "the rank host had started"
    else:
        assert all("the fork server" in way for way in ways)
        with Cluster(1, device="cpu") as another:
            assert started(another) == [FORKED], "by another fork server"


def test_a_fork_server_that_was_killed_is_replaced() -> None:
    fork_server_client.close()
    fork_server_client.prepare(os.environ)
    killed = server_pid()
    os.kill(killed, signal.SIGKILL)
    assert not fork_server_client.await_ready(60), "its end is known"
    with Cluster(1, device="cpu") as cluster:
        assert started(cluster) == [FORKED]
        assert server_pid() != killed


def test_a_rank_has_what_its_first_optimizer_imports() -> None:
    fork_server_client.prepare(os.environ)
    assert fork_server_client.await_ready(60)
    with Cluster(1, device="cpu") as cluster:
        assert started(cluster) == [FORKED]
        cluster.execute("import sys; seen = 'torch._dynamo' in sys.modules")
        assert cluster["seen"] == [True]


def test_the_fork_server_serves_before_its_later_imports() -> None:
    fork_server_client.close()
    with Cluster(1, device="cpu") as cluster:
        assert started(cluster) == [FORKED]
        cluster.execute("import sys; seen = 'torch._dynamo' in sys.modules")
        assert cluster["seen"] == [False]
    assert fork_server_client.await_ready(60)


def test_a_replaced_rank_has_what_its_rank_host_imports_later() -> None:
    fork_server_client.close()
    with Cluster(2, device="cpu", threads=1) as cluster:
        cluster.execute("import sys; seen = 'torch._dynamo' in sys.modules")
        assert cluster["seen"] == [False, False]
        host = rank_host(cluster)
        before = host.memory_info().rss

        def has_imported() -> bool:
            return (
                host.memory_info().rss > before + 3e7
                and host.status() == psutil.STATUS_SLEEPING
            )

        wait_until(has_imported, 60)
        os.kill(cluster.infos[1].pid, signal.SIGKILL)
        wait_until(lambda: bool(cluster.died()))
        cluster.execute("import sys; seen = 'torch._dynamo' in sys.modules")
        assert started(cluster) == [FORKED, FORKED]
        assert cluster["seen"] == [False, True]


def test_a_later_import_that_fails_is_left_to_the_ranks() -> None:
    program = (
        "import socket, sys\n"
        "from nbdist.ipc import fork_messages, fork_server\n"
        "fork_server.LATER = ('no_such_module', 'colorsys')\n"
        "ours, theirs = socket.socketpair()\n"
        "server = fork_server._Server(theirs)\n"
        "for _ in range(2):\n"
        "    server._import_next()\n"
        "assert 'complete' in fork_messages.receive(ours)[0]\n"
        "assert sys.modules['colorsys'].__file__ in server.stamps.files\n"
        "assert server.stamps.changed() is None\n"
    )
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    subprocess.run(command, env=one_thread, timeout=60, check=True)


def test_a_rank_host_without_a_process_supervisor_ends(tmp_path: Path) -> None:
    program = (
        "import socket, sys\n"
        "from nbdist.ipc import fork_server\n"
        "fork_server.SUPERVISOR_TIMEOUT_S = 0.1\n"
        "listener = socket.socket(socket.AF_UNIX)\n"
        "listener.bind(sys.argv[1])\n"
        "listener.listen()\n"
        "nothing = fork_server._Stamps({}), fork_server._Shadows(), []\n"
        "fork_server._RankHost(listener, *nothing).run()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "socket")]
    assert subprocess.run(command, timeout=30).returncode == 0


def test_a_rank_ends_with_its_parent_process(two: Cluster) -> None:
    with Cluster(2, device="cpu", on_failure="stop") as cluster:
        rank = psutil.Process(cluster.infos[1].pid)
        os.kill(cluster.infos[1].parent_pid, signal.SIGKILL)
        wait_until(lambda: not runs(rank))


# -- when ranks are not forked -----------------------------------------------------


def module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))


def test_a_preloaded_package_that_has_changed_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = f"preloaded_{random.randrange(10**9)}"
    monkeypatch.syspath_prepend(str(tmp_path))
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("NBDIST_PRELOAD", name)
    module(tmp_path, name, "import os\nversion, pid = 1, os.getpid()\n")
    look = f"import {name}, os; seen = {name}.version, {name}.pid == os.getpid()"
    with Cluster(1, device="cpu") as cluster:
        cluster.execute(look)
        assert (started(cluster), cluster["seen"]) == ([FORKED], [(1, False)])
        server = server_pid()
        module(tmp_path, name, "import os\nversion, pid = 22, os.getpid()\n")
        cluster.restart()
        cluster.execute(look)
        assert (started(cluster), cluster["seen"]) == ([FORKED], [(22, False)])
        assert server_pid() != server


@pytest.mark.not_forked
def test_a_sitecustomize_of_the_user_runs_in_each_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module(
        tmp_path, "sitecustomize", "import os\nos.environ['BEGUN'] = str(os.getpid())\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    with Cluster(2, device="cpu") as cluster:
        cluster.execute("import os; assert os.environ['BEGUN'] == str(os.getpid())")
        cluster.execute(SUM)
    with Cluster(1, device="cpu") as cluster:
        (how,) = started(cluster)
        assert (
            how == f"{tmp_path / 'sitecustomize.py'} runs at the start of each process"
        )


@pytest.mark.not_forked
def test_a_module_of_the_user_is_not_replaced_by_a_preloaded_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import decorator  # ipyparallel imports it

    text = Path(decorator.__file__).read_text()
    (tmp_path / "decorator.py").write_text(f"{text}\nis_mine = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fork_server_client.prepare(os.environ)
    with Cluster(1, device="cpu") as cluster:
        (how,) = started(cluster)
        assert str(tmp_path / "decorator.py") in how
        cluster.execute("import decorator; assert decorator.is_mine")


def test_a_copy_of_a_preloaded_module_on_the_path_prevents_no_fork(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import decorator

    shutil.copy(decorator.__file__, tmp_path / "decorator.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    fork_server_client.prepare(os.environ)
    with Cluster(1, device="cpu") as cluster:
        assert started(cluster) == [FORKED]


PREVENTS = {
    "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n": (
        "an import has started 1 thread"
    ),
    "raise RuntimeError('no such thing')\n": "RuntimeError: no such thing",
    "import os\nos._exit(3)\n": "the fork server has ended with exit code 3",
}
"""What a module does at its import, and why it is not forked."""


@pytest.mark.not_forked
@some_or_all(1)
def test_ranks_are_started_if_a_preload_prevents_the_fork(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, most: int | None
) -> None:
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    for text in drawn(PREVENTS, most):
        name = f"preloaded_{random.randrange(10**9)}"
        monkeypatch.setenv("NBDIST_PRELOAD", name)
        module(tmp_path, name, text)
        session = Session()
        try:
            session.start(1, device="cpu")
            session.execute(SUM, None, None, 1)
            session.stop()
            session.start(1, device="cpu")  # it has been seen by now
            assert PREVENTS[text] in repr(session.status_table())
        finally:
            session.stop()


def test_ranks_are_forked_in_a_folder_with_a_long_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with Cluster(1, device="cpu") as cluster:
        assert started(cluster) == [FORKED]
        assert ClusterProcesses.of(cluster).run_dir.is_relative_to(folder)


def test_the_status_shows_how_many_ranks_were_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = Session()
    for preload, said in (
        ("", "; 1 of 1 ranks forked"),
        ("0", "; 1 of 1 ranks not forked: switched off by NBDIST_PRELOAD=0"),
    ):
        monkeypatch.setenv("NBDIST_PRELOAD", preload)
        try:
            session.start(1, device="cpu")
            assert said in repr(session.status_table())
        finally:
            session.stop()


def test_another_environment_has_another_fork_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Cluster(1, device="cpu") as cluster:
        before = psutil.Process(server_pid())
        monkeypatch.setenv("TORCH_SOMETHING_READ_AT_IMPORT", "1")
        fork_server_client.prepare(os.environ)
        assert server_pid() != before.pid
        cluster.execute(SUM)
        assert before.is_running(), "it collects the rank host's exit"
    wait_until(lambda: not before.is_running())
    assert not psutil.pid_exists(before.pid), "it is a zombie"


def test_a_prepared_fork_server_serves_outside_a_virtual_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher adds the path of its MPI library to the ranks' environment."""
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    assert "LD_LIBRARY_PATH" in library_of_wheel()
    # It would outlast the test: rank-only names raise in a notebook's process.
    monkeypatch.setattr(lazy, "refuse_rank_names", lambda: None)
    load_ipython_extension(InteractiveShell())
    before = server_pid()
    with Cluster(1, device="cpu") as cluster:
        assert started(cluster) == [FORKED]
        assert server_pid() == before


@pytest.mark.skipif(MPICH is None, reason="no MPICH is installed")
def test_clusters_with_the_mpi_of_the_system_have_one_fork_server() -> None:
    servers = []
    for _ in range(2):
        with Cluster(1, device="cpu", mpiexec=MPICH) as cluster:
            assert started(cluster) == [FORKED]
            assert "MPICH" in cluster.mpi
            servers.append(server_pid())
    assert servers[0] == servers[1]


def test_a_fork_server_ends_with_its_program_during_its_imports() -> None:
    begin = (
        "import os, time\n"
        "from nbdist.clusters import fork_server_client as client\n"
        "client.prepare(os.environ)\n"
        "print(client._server._process.pid, flush=True)\n"
        "time.sleep(100)"
    )
    with Program(begin) as program:
        server = psutil.Process(int(program.line()))
        program.kill()
        wait_until(lambda: not server.is_running(), 60)
