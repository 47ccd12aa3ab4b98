"""Workers run, report their ends, and end with the notebook."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import nbdist
from nbdist.clusters import workers as workers_module
from nbdist.clusters.workers import Worker
from nbdist.errors import UsageError
from tests.processes import Footprint, Program, runs, wait_until

FOR_EVER = "import time\nprint('started')\nwhile True: time.sleep(60)"


@pytest.fixture(autouse=True)
def _no_worker_stays() -> Iterator[None]:
    yield
    nbdist.stop_workers()


def test_workers_have_their_own_ids_and_results(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("work.py").write_text(
        "import os, sys\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['COLOUR'],\n"
        "      sys.argv[1:], os.getcwd())\n"
        "print('half a line', end='')\n"
        "print('complaint', file=sys.stderr)\n"
    )
    workers = nbdist.launch_workers(2, "work.py", ["--lr", 0.1], {"COLOUR": "red"})
    result = nbdist.await_workers(workers)
    assert result.ok
    assert [report.id for report in result.succeeded] == [w.id for w in workers]
    for rank, worker in enumerate(workers):
        expected = f"{rank} 2 red ['--lr', '0.1'] {tmp_path}\nhalf a linecomplaint\n"
        assert worker.output == expected
        assert (worker.status, worker.exit_code) == ("succeeded", 0)
    shown = capsys.readouterr().out
    for rank, worker in enumerate(workers):
        assert f"[worker {worker.id}] {rank} 2 red" in shown
    assert shown.count("half a linecomplaint\n") == 2
    assert set(workers) <= set(nbdist.list_workers())
    assert nbdist.await_workers(workers[1].id, show=False).ok  # by its id, and again


def test_the_end_of_each_worker_is_reported_once():
    nbdist.await_workers()
    workers = nbdist.launch_workers(2, code="print('x')")
    wait_until(lambda: all(worker.ended for worker in workers))
    result = nbdist.await_workers(show=False)
    assert [report.id for report in result.workers] == [w.id for w in workers]
    assert nbdist.await_workers(show=False).workers == []


def test_a_failed_worker_is_reported_and_the_others_continue():
    workers = nbdist.launch_workers(
        4,
        code="""
import os, sys, time
rank = int(os.environ["RANK"])
print("rank", rank, "speaks", flush=True)
if rank == 1: sys.exit(3)
if rank == 2: os.kill(os.getpid(), 9)
if rank == 3: raise ValueError("no such digit")
time.sleep(0.5)
""",
    )
    result = nbdist.await_workers(workers)
    assert [report.rank for report in result.succeeded] == [0]
    code, killed, raised = result.failures
    assert (code.reason, code.exit_code) == ("exit code 3", 3)
    assert (killed.reason, killed.exit_code) == ("SIGKILL", -9)
    assert killed.last_lines == ("rank 2 speaks",)
    assert raised.last_lines[-1] == "ValueError: no such digit"
    assert "failed (SIGKILL)" in str(result)
    assert "    ValueError: no such digit" in str(result)


def test_a_wait_ends_at_its_timeout_and_stopping_ends_the_worker():
    (worker,) = nbdist.launch_workers(
        1,
        code="import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        + FOR_EVER,
    )
    result = nbdist.await_workers(worker, wait_for_completion=False)
    assert [report.status for report in result.unfinished] == ["running"]
    wait_until(lambda: "started" in worker.output)
    start = time.monotonic()
    result = nbdist.await_workers(worker, timeout_seconds=0.3)
    assert time.monotonic() - start > 0.2
    assert [report.id for report in result.unfinished] == [worker.id]
    child = psutil.Process(worker.pid).children()[0]
    nbdist.stop_workers(worker)
    assert (worker.status, worker.exit_code) == ("stopped", -signal.SIGTERM)
    assert not runs(child)
    assert not nbdist.await_workers(worker).ok
    nbdist.stop_workers(worker)  # again: nothing happens


def test_a_worker_that_ignores_sigterm_is_killed():
    (deaf,) = nbdist.launch_workers(
        1,
        code="import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + FOR_EVER,
    )
    wait_until(lambda: "started" in deaf.output)
    nbdist.stop_workers(deaf.id)
    assert deaf.exit_code == -signal.SIGKILL


def test_workers_of_a_cluster_have_their_roles():
    members = nbdist.run_cluster(
        2,
        1,
        code="import os, json\n"
        "names = ['ROLE_NAME', 'ROLE_RANK', 'ROLE_WORLD_SIZE', 'TF_CONFIG']\n"
        "print(json.dumps([os.environ[name] for name in names]))",
    )
    assert [each.role for each in members.members] == ["worker", "worker", "ps"]
    assert [each.rank for each in members.workers] == [0, 1]
    assert [each.rank for each in members.servers] == [2]
    assert nbdist.await_workers(members, show=False).ok
    printed = [json.loads(member.output) for member in members.members]
    assert [each[:3] for each in printed] == [
        ["worker", "0", "2"], ["worker", "1", "2"], ["ps", "0", "1"],
    ]  # fmt: skip
    configs = [json.loads(each[3]) for each in printed]
    assert configs[0]["cluster"] == configs[2]["cluster"]
    addresses = [*itertools.chain(*configs[0]["cluster"].values())]
    assert len(set(addresses)) == 3
    assert configs[2]["task"] == {"type": "ps", "index": 0}


def test_the_calls_of_clouderas_library_work_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workers = nbdist.launch_workers(
        n=2, cpu=1, memory=4, nvidia_gpu=0, script="", code="print('hello')", env={}
    )
    ids = [worker["id"] for worker in workers]
    result = nbdist.await_workers(ids, wait_for_completion=True, timeout_seconds=60)
    assert result["failures"] == []
    assert [each["id"] for each in result["workers"]] == ids
    assert result["workers"][0]["ip_address"] == "127.0.0.1"
    assert {
        each["id"]: each["ip_address"] for each in nbdist.list_workers()
    }.items() >= {(number, "127.0.0.1") for number in ids}
    nbdist.stop_workers(*ids)
    (broken,) = nbdist.launch_workers(n=1, code="raise SystemExit(3)")
    failures = nbdist.await_workers([broken["id"]], show=False)["failures"]
    assert [(each["id"], each["reason"]) for each in failures] == [
        (broken["id"], "exit code 3")
    ]
    assert dict(broken)["status"] == "failed"
    with pytest.raises(KeyError, match="'engine': expected one of id, rank"):
        broken["engine"]

    Path("train_worker.py").write_text(
        "import json, os\nprint(json.loads(os.environ['TF_CONFIG'])['cluster'])"
    )
    cluster_spec, session_addr = nbdist.run_cluster(
        n_workers=2, n_ps=1, cpu=0.5, memory=2, worker_script="train_worker"
    )
    assert {role: len(each) for role, each in cluster_spec.items()} == {
        "worker": 2,
        "ps": 1,
    }
    assert session_addr == f"grpc://{cluster_spec['worker'][0]}"
    started = nbdist.list_workers()[-3:]
    assert nbdist.await_workers(started, show=False).ok
    assert [each.output.strip() for each in started] == [str(cluster_spec)] * 3


def test_workers_form_a_torch_distributed_world():
    workers = nbdist.launch_workers(
        2,
        code="import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(x)\n"
        "print(x.item())\n"
        "dist.destroy_process_group()",
        cpu=1,
    )
    result = nbdist.await_workers(workers, timeout_seconds=90, show=False)
    assert result.ok, str(result)
    assert [worker.output for worker in workers] == ["3.0\n", "3.0\n"]


def test_the_limits_of_a_worker_are_enforced():
    (worker,) = nbdist.launch_workers(
        1,
        code="import os\nprint(os.environ['OMP_NUM_THREADS'])\nbytearray(2**30)",
        cpu=2.5,
        memory=0.5,
        nvidia_gpu=0,
    )
    (failed,) = nbdist.await_workers(worker, show=False).failures
    assert failed.last_lines[0] == "2"
    assert failed.last_lines[-1] == "MemoryError"


def test_no_worker_outlives_its_notebook():
    with Program(
        "import nbdist\n"
        f"a, b = nbdist.launch_workers(2, code={FOR_EVER!r})\n"
        "nbdist.await_workers([a, b], wait_for_completion=False)\n"
        "print('has', a.pid, b.pid, a.process_supervisor.run_dir, flush=True)\n"
        "input()"
    ) as notebook:
        line = ""
        while not line.startswith("has "):  # a worker may have printed before
            line = notebook.line()
        _, *pids, folder = line.split()
        left = Footprint([int(pid) for pid in pids], Path(folder))
        notebook.kill()
        left.assert_gone()


def test_when_the_supervisor_is_killed_its_workers_are_lost_and_new_ones_start(capsys):
    (worker,) = nbdist.launch_workers(1, code=FOR_EVER)
    nbdist.await_workers(worker, wait_for_completion=False)
    process = psutil.Process(worker.pid)
    os.kill(process.ppid(), signal.SIGKILL)
    result = nbdist.await_workers(worker)
    assert result.failures[0].reason == "the process supervisor was killed"
    psutil.wait_procs([process], timeout=10)
    (new,) = nbdist.launch_workers(1, code="print('new')")
    assert nbdist.await_workers(new).ok
    assert new.output == "new\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"n": 0, "code": "1"}, "n=0: expected a whole number, 1 or more"),
        ({"n": 1}, "either a script or code"),
        ({"n": 1, "code": "1", "script": "a.py"}, "either a script or code"),
        ({"n": 1, "script": "absent.py"}, "no script 'absent.py'"),
        ({"n": 1, "code": "1", "cpu": 0}, "cpu=0"),
        ({"n": 1, "code": "1", "memory": -1}, "memory=-1"),
        ({"n": 2, "code": "1", "nvidia_gpu": 99}, "needs 198 GPUs"),
    ],
)
def test_invalid_arguments_start_nothing(arguments, says):
    before = nbdist.list_workers()
    with pytest.raises(UsageError, match=says):
        nbdist.launch_workers(**arguments)
    assert nbdist.list_workers() == before


def test_an_unknown_worker_is_an_error():
    with pytest.raises(UsageError, match="no worker 10000: there are"):
        nbdist.await_workers(10_000)
    with pytest.raises(UsageError, match="timeout_seconds=-1"):
        nbdist.await_workers(timeout_seconds=-1)
    assert nbdist.list_workers() is not nbdist.list_workers()


class Processes:
    """A process supervisor whose programs a test writes and ends."""

    alive = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.codes: dict[str, int] = {}

    def log(self, name: str) -> Path:
        return self._folder / name

    def pid(self, _name: str) -> int:
        return os.getpid()

    def exit_code(self, name: str) -> int | None:
        return self.codes.get(name)

    def wait(self, done: Any, _timeout_s: float | None) -> bool:
        return bool(done())


def test_half_a_line_is_shown_with_its_other_half_or_the_end(tmp_path: Path) -> None:
    processes: Any = Processes(tmp_path)
    worker = Worker(0, 0, "worker", processes)
    assert worker.new_lines() == []
    log = processes.log(worker.name)
    log.write_text("one\ntw")
    assert worker.new_lines() == ["one"]
    assert worker.new_lines() == []
    log.write_text("one\ntwo\nthr")
    assert worker.new_lines() == ["two"]
    processes.codes[worker.name] = 0
    assert worker.new_lines() == ["thr"]


def test_a_worker_is_awaited_again_until_its_end_was_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: Any = Processes(tmp_path)
    pair = [Worker(number, number, "worker", processes) for number in range(2)]
    monkeypatch.setattr(workers_module, "_workers", pair)
    processes.codes["worker0"] = 0

    def reported() -> list[int]:
        found = nbdist.await_workers(timeout_seconds=0, show=False)
        return [report.id for report in found.workers]

    assert reported() == [0, 1]
    assert reported() == [1]
    processes.codes["worker1"] = 3
    assert reported() == [1]
    assert reported() == []
    processes.alive = False  # nothing is left to stop
