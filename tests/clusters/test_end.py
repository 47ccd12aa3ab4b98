"""However a cluster or its notebook ends, nothing of it is left after 10 seconds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from nbdist import Cluster
from nbdist.errors import NotRunning
from tests.cluster_processes import ClusterProcesses
from tests.processes import Footprint, Program, wait_until
from tests.seed import drawn, some_or_all

START = """
import os, sys, time
from nbdist import Cluster
cluster = Cluster(n=2, device="cpu").start()
cluster.push(big=b"x" * 3_000_000)
print(cluster._started.process_supervisor.run_dir, flush=True)
"""

ENDINGS = {
    "the end of a with": "with cluster: pass",
    "stop": "cluster.stop(); cluster.stop()",
    "the end of the interpreter": "",
    "an exception": "raise RuntimeError('a bug')",
    "sys.exit": "sys.exit(4)",
    "os._exit": "os._exit(4)",
}


def run_dir_of(program: Program) -> Path:
    """The run folder of a program's cluster, once the cluster is up."""
    run_dir = Path(program.line())
    assert run_dir.is_dir()
    return run_dir


WORK = (
    "time.sleep(100)",
    "cluster.execute('import time; time.sleep(100)')",
    "cluster.execute('while True: pass')",
    "cluster.execute('import os, signal; os.kill(os.getpid(), signal.SIGSTOP)')",
    "cluster.execute('!sleep 100')",
)


@some_or_all(3)
def test_nothing_is_left_when_a_program_ends(most: int | None):
    for name in drawn(ENDINGS, most):
        with Program(f"{START}sys.stdin.readline()\n{ENDINGS[name]}") as program:
            footprint = Footprint([program.pid], run_dir_of(program))
            assert len(footprint.processes) >= 6
            program.tell("go on")
            footprint.assert_gone()


@some_or_all(3)
def test_nothing_is_left_when_the_notebook_is_killed(most: int | None):
    for work in drawn(WORK, most):
        with Program(f"{START}print('working', flush=True)\n{work}") as program:
            run_dir = run_dir_of(program)
            assert program.line() == "working"
            footprint = Footprint([program.pid], run_dir)
            program.kill()
            footprint.assert_gone()


def test_nothing_is_left_when_a_notebook_with_a_forked_child_is_killed():
    """The child inherits the notebook's descriptors and continues to run."""
    fork = "child = os.fork()\nchild and print(child, flush=True)\ntime.sleep(100)"
    with Program(START + fork) as program:
        run_dir = run_dir_of(program)
        footprint = Footprint([program.pid], run_dir)
        child = psutil.Process(int(program.line()))
        try:
            program.kill()
            footprint.processes.discard(child)
            footprint.assert_gone()
            assert child.is_running()
        finally:
            child.kill()


def victim_pid(cluster: Cluster, victim: str) -> int:
    assert cluster._started is not None
    client = cluster._started.process_supervisor
    return (
        client._process.pid
        if victim == "process supervisor"
        else client.pid(victim) or 0
    )


@pytest.mark.parametrize("victim", ["mpiexec", "controller", "process supervisor"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a cell"])
def test_nothing_is_left_when_a_helper_process_is_killed(victim: str, busy: bool):
    cluster = Cluster(n=2, device="cpu").start()
    try:
        assert cluster._started is not None
        run_dir = cluster._started.process_supervisor.run_dir
        footprint = Footprint([victim_pid(cluster, "process supervisor")], run_dir)
        pid = victim_pid(cluster, victim)
        if busy:
            result = cluster.execute(
                f"import os, time\nif rank: os.kill({pid}, 9)\ntime.sleep(3600)",
                check=False,
            )
            assert {f.ename for f in result.failures} == {"RankDied"}
        else:
            os.kill(pid, signal.SIGKILL)
        footprint.assert_gone()
        wait_until(lambda: not cluster.running)
        notes: list[str] = []
        cluster.on_note = notes.append
        cluster.execute("nbdist.barrier()")
        assert re.search(f"{victim}.* SIGKILL.*were started again", notes[-1])
    finally:
        cluster.stop()


def test_a_stopped_cluster_raises_not_running_and_can_start_again():
    cluster = Cluster(n=1, device="cpu").start()
    cluster.stop()
    assert not cluster.running
    calls: list[Callable[[], object]] = [
        lambda: cluster.execute("1"),
        lambda: cluster.push(a=1),
        lambda: cluster["a"],
        lambda: cluster.status(),
        lambda: cluster.ranks,
    ]
    for call in calls:
        with pytest.raises(NotRunning, match="%dist_start"):
            call()
    with cluster.start():
        assert cluster["rank"] == [0]
    assert not cluster.running


def test_processes_that_ranks_have_started_end_with_the_cluster():
    cluster = Cluster(n=1, device="cpu").start()
    cluster.execute(
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "stubborn = subprocess.Popen(['sh', '-c', \"trap '' TERM; sleep 1000\"])"
    )
    footprint = Footprint(p.pid for p in ClusterProcesses.of(cluster).all())
    assert {"sleep", "sh"} <= {process.name() for process in footprint.processes}
    cluster.stop()
    footprint.assert_gone()


LOADS = """
from torch.utils.data import Dataset

class Ten(Dataset):
    def __len__(self): return 10
    def __getitem__(self, place): return torch.ones(3) * place

batches = iter(nbdist.loader(Ten(), 1, num_workers=2))
first = next(batches)
"""


def test_loader_workers_of_a_killed_rank_leave_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Cluster(n=2, device="cpu") as cluster:
        cluster.execute("import tempfile\n" + LOADS, timeout_s=60)
        assert cluster["tempfile.gettempdir()"] == [str(tmp_path)] * 2  # the user's own
        os.kill(cluster.ranks[1].pid, signal.SIGKILL)
        wait_until(lambda: 1 in cluster.died())
    assert list(tmp_path.glob("pymp-*")) == []


def test_the_file_of_a_value_in_transfer_is_removed():
    packing = (
        "from nbdist.ipc import serialization, shm_payload\n"
        "run_dir = cluster._started.process_supervisor.run_dir\n"
        "shipment = shm_payload.load(serialization.dumps(b'x' * 3_000_000), run_dir)\n"
        "print(shipment.path, flush=True)\n"
        "time.sleep(100)"
    )
    with Program(START + packing) as program:
        run_dir = run_dir_of(program)
        path = Path(program.line())
        assert path.is_file()
        footprint = Footprint([program.pid], run_dir, path)
        program.kill()
        footprint.assert_gone()


def test_cudas_files_in_shared_memory_end_with_their_rank():
    """CUDA IPC makes such files: torch counts readers in its own."""
    with Cluster(n=2, device="cpu") as cluster:
        cluster.execute(
            "import os\n"
            "pid, user = os.getpid(), os.getuid()\n"
            "names = [f'torch_{pid}_1_0', f'cuda.shm.{user}.{pid:x}.1']\n"
            "paths = [f'/dev/shm/{name}' for name in names]\n"
            "for path in paths:\n"
            "    with open(path, 'w'): pass"
        )
        first, second = [list(map(Path, paths)) for paths in cluster["paths"]]
        os.kill(cluster.ranks[1].pid, signal.SIGKILL)
        wait_until(lambda: not any(path.exists() for path in second))
        assert all(path.exists() for path in first)
    wait_until(lambda: not any(path.exists() for path in first))


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_program_ends_in_silence(is_stopped: bool):
    code = "from nbdist import Cluster; cluster = Cluster(1, device='cpu').start()"
    if is_stopped:
        code += "; cluster.stop()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
