"""Scripts for torchrun run on the ranks of a cluster, unchanged."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import threading
from pathlib import Path

import pytest

from nbdist import Cluster
from nbdist.errors import (
    CellError,
    CellInterrupted,
    CellTimeout,
    PortInUse,
    UsageError,
)
from tests.seed import SEED

DRAW = random.Random(SEED)
SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(tmp_path: Path):
    """A function that writes a script and returns its path."""

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def assert_whole(cluster: Cluster) -> None:
    """Check that all ranks are in one world whose collectives work."""
    cluster.execute("x = torch.ones(1); dist.all_reduce(x); assert x.item() == 4")


def test_a_torchrun_script_trains_digits(cluster: Cluster):
    saved = Path("model-of-a-script.pt")  # relative: it lands where the notebook is
    try:
        result = cluster.run_script(
            SCRIPTS / "digits_ddp.py", ["--epochs", "6", "--save", saved]
        )
        assert saved.stat().st_size > 10_000
    finally:
        saved.unlink(missing_ok=True)
    accuracy = re.fullmatch(r"accuracy (0\.\d+)\n", result[0].stdout)
    assert float(accuracy[1]) > 0.85
    assert [result[rank].stdout for rank in (1, 2, 3)] == [""] * 3
    assert_whole(cluster)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_other_backends_use_the_default_group(cluster: Cluster, backend: str):
    arguments = ["--epochs", "1", "--backend", backend]
    result = cluster.run_script(SCRIPTS / "digits_ddp.py", arguments)
    assert "accuracy" in result[0].stdout


def test_a_script_has_the_environment_of_torchrun_and_leaves_nothing(
    cluster: Cluster, script
):
    path = script(
        """
import os, sys, json, signal, torch, asyncio
import helper
import torch.distributed as dist
assert not hasattr(sys.modules["__main__"], "get_ipython")
sub = dist.new_group([0, 1])
os.environ["LEFT"] = "1"
signal.signal(signal.SIGINT, signal.SIG_IGN)
async def three(): return 3
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "ROLE_NAME", "ROLE_RANK", "MASTER_ADDR"]
print(json.dumps({
    "argv": sys.argv[1:], "name": __name__, "file": __file__, "helper": helper.WORD,
    "environment": [os.environ[name] for name in names],
    "config": json.loads(os.environ["TF_CONFIG"]),
    "elastic": dist.is_torchelastic_launched(), "asyncio": asyncio.run(three()),
    "pickled": __import__("pickle").dumps(three).hex() != "",
}))
os.chdir("/")
leftover = 1
"""
    )
    script("WORD = 'first'", "helper.py")
    cluster.execute(
        "mine = 5; import os; before = dict(os.environ), os.getcwd()\n"
        "from torch.distributed.distributed_c10d import _world\n"
        "groups = list(_world.pg_map)"
    )
    result = cluster.run_script(path, ["--lr", "0.1", "two words"], n_ps=1)
    found = [json.loads(result[rank].stdout) for rank in range(4)]
    for rank, seen in enumerate(found):
        assert seen["argv"] == ["--lr", "0.1", "two words"]
        assert (seen["name"], seen["file"]) == ("__main__", str(path))
        role = ["worker", str(rank)] if rank < 3 else ["ps", "0"]
        assert seen["environment"] == [
            str(rank), "4", str(rank), *role, "127.0.0.1",
        ]  # fmt: skip
        assert seen["config"]["task"] == {"type": role[0], "index": int(role[1])}
        assert len(seen["config"]["cluster"]["worker"]) == 3
        assert seen["elastic"]
        assert (seen["asyncio"], seen["helper"]) == (3, "first")
    # The script's names are removed and the cells' are kept; the helper is reloaded.
    cluster.execute(
        "assert mine == 5 and 'leftover' not in globals()\n"
        "assert (dict(os.environ), os.getcwd()) == before\n"
        "assert __name__ == '__main__'\n"
        "assert list(_world.pg_map) == groups, _world.pg_map"
    )
    script("WORD = 'second'", "helper.py")
    again = cluster.run_script(path)
    assert json.loads(again[0].stdout)["helper"] == "second"
    assert_whole(cluster)


def test_variables_are_kept_with_keep(cluster: Cluster, script):
    path = script(
        """
class Net: pass
rank = "the script's own"
net = Net()
values = [1, 2]
raise ValueError("after the values")
"""
    )
    with pytest.raises(CellError):
        cluster.run_script(path, keep=True)
    assert cluster["values"] == [[1, 2]] * 4
    assert cluster["type(net).__name__"] == ["Net"] * 4
    assert cluster["rank"] == [0, 1, 2, 3]  # the rank's number stays


def test_exit_codes_are_reported(cluster: Cluster, script):
    path = script("import os, sys\nsys.exit(3 if os.environ['RANK'] == '2' else 0)")
    with pytest.raises(CellError) as raised:
        cluster.run_script(path)
    text = "rank 2 of 4 in train.py line 2: SystemExit: exit code 3"
    assert str(raised.value) == text
    assert [part.ok for part in raised.value.result.ranks.values()] == [
        True, True, False, True,
    ]  # fmt: skip
    with pytest.raises(CellError, match="exit code 1: no data"):
        cluster.run_script(script("import sys; sys.exit('no data')"))
    wrong = cluster.run_script(SCRIPTS / "digits_ddp.py", ["--nothing"], check=False)
    assert wrong.failures[0].evalue == "exit code 2"
    assert "unrecognized arguments: --nothing" in wrong[0].stderr


def test_errors_name_the_line_of_the_script(cluster: Cluster, script):
    path = script(
        """import torch, torch.distributed as dist
def step(number):
    dist.barrier()
    if dist.get_rank() == 1:
        torch.zeros(2) + torch.zeros(3)  # the bad line
    dist.all_reduce(torch.zeros(1))
step(1)
"""
    )
    with pytest.raises(CellError) as raised:
        cluster.run_script(path)
    first, *others = str(raised.value).splitlines()
    assert first.startswith("rank 1 of 4 in train.py line 5: RuntimeError: The size of")
    assert "rank 1 has ended" in others[0]
    shown = "\n".join(raised.value.rendered)
    assert "the bad line" in shown
    assert str(path) in shown or "train.py" in shown
    assert "run_script.py" not in shown
    with pytest.raises(CellError, match=r"SyntaxError.*train\.py, line 1"):
        cluster.run_script(script("for"))
    assert_whole(cluster)


def test_a_script_is_interrupted_wherever_it_waits(cluster: Cluster, script):
    path = script(
        """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    while True: pass
dist.all_reduce(torch.zeros(1))
"""
    )
    with pytest.raises(CellTimeout, match=r"rank 0 at train\.py line 5"):
        cluster.run_script(path, timeout_s=2)
    main = threading.main_thread().ident
    timer = threading.Timer(1.5, lambda: os.kill(os.getpid(), 2) if main else None)
    timer.start()
    with pytest.raises(CellInterrupted):
        cluster.run_script(path)
    assert_whole(cluster)


def test_a_script_that_cannot_run_is_refused_before_anything_is_sent(
    cluster: Cluster, script
):
    with pytest.raises(UsageError, match=r"no script 'absent\.py': /.*does not exist"):
        cluster.run_script("absent.py")
    path = script("print(1)")
    for wrong in (4, -1, 1.5):
        with pytest.raises(UsageError, match="expected 0 to 3 parameter servers of 4"):
            cluster.run_script(path, n_ps=wrong)
    path = script(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', rank=0, world_size=1)"
    )
    with pytest.raises(CellError, match="leave both out"):
        cluster.run_script(path)


def test_a_script_may_choose_the_start_method_each_time(cluster: Cluster, script):
    path = script(
        """
import multiprocessing as mp
import os

def child(queue):
    queue.put((mp.get_start_method(), os.environ["RANK"]))

if __name__ == "__main__":
    mp.set_start_method("spawn")
    queue = mp.SimpleQueue()
    process = mp.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(), flush=True)
    process.join()
"""
    )
    method = "__import__('multiprocessing').get_start_method(allow_none=True)"
    before = cluster[method]
    for _run in range(2):
        result = cluster.run_script(path)
        shown = [result[rank].stdout.strip() for rank in range(4)]
        assert shown == [f"('spawn', '{rank}')" for rank in range(4)]
    assert cluster[method] == before


def test_the_fork_server_of_a_script_ends_with_it(cluster: Cluster, script):
    module = "__import__('multiprocessing.forkserver').forkserver"
    server = f"{module}._forkserver._forkserver_pid"
    before = cluster[server]
    text = """
import multiprocessing as mp
import os
import sys

def child(queue):
    queue.put((NUMBER, sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"]))

if __name__ == "__main__":
    mp.set_start_method("forkserver")
    queue = mp.SimpleQueue()
    process = mp.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(), flush=True)
    process.join()
else:
    NUMBER = {}
"""
    for number in DRAW.sample(range(100), 2):
        result = cluster.run_script(script(text.format(number)), [str(number)])
        shown = [result[rank].stdout.strip() for rank in range(4)]
        assert shown == [f"({number}, '{number}', '0')"] * 4
    assert cluster[server] == before


@pytest.mark.parametrize("victim", [1, DRAW.choice([0, 2, 3])], ids=["exits", "raises"])
def test_all_ranks_begin_again_after_one_fails(cluster: Cluster, victim: int):
    notes: list[str] = []
    before, cluster.on_note = cluster.on_note, notes.append
    how = "exits" if victim == 1 else "raises"
    try:
        result = cluster.run_script(
            SCRIPTS / "begins_again.py", [how, str(victim), "2"], max_restarts=3
        )
    finally:
        cluster.on_note = before
    for rank in range(4):
        assert result[rank].stdout == f"run 2 of 3 on {rank}\nsum 4\n"
    failed = [note.splitlines()[0] for note in notes]
    why = "exit code 7" if how == "exits" else "ValueError: run 0 fails"
    assert why in failed[0]
    assert failed[0].startswith(f"rank {victim} of 4 in begins_again.py line ")
    assert [note.splitlines()[-1] for note in notes] == [
        f"begins_again.py begins again on all ranks: restart {count} of 3"
        for count in (1, 2)
    ]
    assert_whole(cluster)


def test_after_the_last_restart_the_error_is_the_last_one(cluster: Cluster):
    notes: list[str] = []
    before, cluster.on_note = cluster.on_note, notes.append
    try:
        with pytest.raises(CellError) as raised:
            cluster.run_script(
                SCRIPTS / "begins_again.py", ["raises", "2", "9"], max_restarts=1
            )
    finally:
        cluster.on_note = before
    first, *others = str(raised.value).splitlines()
    assert "ValueError: run 1 fails" in first
    assert first.startswith("rank 2 of 4")
    assert any("Ended: interrupted, because rank 2 has failed" in o for o in others)
    assert len(notes) == 1
    with pytest.raises(UsageError, match="--max-restarts -1: expected a whole number"):
        cluster.run_script(SCRIPTS / "begins_again.py", max_restarts=-1)
    assert_whole(cluster)


def test_all_ranks_begin_again_after_one_dies(cluster: Cluster):
    victim = DRAW.choice(range(4))
    notes: list[str] = []
    before, cluster.on_note = cluster.on_note, notes.append
    try:
        result = cluster.run_script(
            SCRIPTS / "begins_again.py", ["dies", str(victim), "1"], max_restarts=1
        )
    finally:
        cluster.on_note = before
    (note,) = notes
    assert note.count(f"rank {victim} was replaced") == 1
    for rank in range(4):
        assert result[rank].stdout == f"run 1 of 1 on {rank}\nsum 4\n"
    assert_whole(cluster)


def test_a_death_after_the_last_restart_is_the_error(cluster: Cluster):
    with pytest.raises(CellError, match=r"rank 3 of 4: RankDied: .*SIGKILL"):
        cluster.run_script(
            SCRIPTS / "begins_again.py", ["dies", "3", "2"], max_restarts=1
        )
    assert_whole(cluster)


def test_worlds_on_one_port_are_an_error_that_names_it(cluster: Cluster):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(PortInUse) as raised:
        cluster.run_script(SCRIPTS / "own_worlds.py", [str(port)], timeout_s=90)
    text = str(raised.value)
    assert re.search(rf"rank \d.* cannot listen on port {port}, because rank \d", text)
    assert f"MASTER_PORT = {port} + int(os.environ['RANK'])" in text
    children = "len(__import__('multiprocessing').active_children())"
    assert cluster[children] == [0] * 4
    assert_whole(cluster)


def test_a_script_uses_its_standard_streams_as_in_a_process_of_its_own(
    cluster: Cluster, script
):
    path = script(
        """
import faulthandler, io, logging, os, subprocess, sys
sys.stdout.reconfigure(line_buffering=True, errors="strict")
sys.stdout.buffer.write(b"octets\\n")
subprocess.run(["echo", "child"], stdout=sys.stdout, check=True)
logging.basicConfig(stream=sys.stdout, format="%(message)s", force=True)
logging.warning("logged")
faulthandler.enable(file=sys.stderr)
with open(sys.stdout.fileno(), "w", closefd=False) as again:
    again.write("descriptor\\n")
if os.environ["RANK"] == "0":
    sys.stdout = open(os.devnull, "w")
else:
    sys.stdout = io.TextIOWrapper(sys.stdout.detach(), "utf-8", line_buffering=True)
print("é", sys.stdout.encoding)
"""
    )
    lines = ["octets", "child", "logged", "descriptor"]
    result = cluster.run_script(path)
    assert result[0].stdout.splitlines() == lines
    assert result[1].stdout.splitlines() == [*lines, "é utf-8"]
    check = "import sys; print(sys.stdout.errors, sys.stdout.line_buffering)"
    assert {each.stdout for each in cluster.execute(check)} == {
        "backslashreplace False\n"
    }


@pytest.fixture
def package(cluster: Cluster, tmp_path: Path):
    """A package in the working folder of the ranks, whose module `train` runs."""
    folder = tmp_path / "own_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "part.py").write_text("value = 5\n")
    (folder / "train.py").write_text(
        "import sys\nfrom .part import value\n"
        "if sys.argv[1:] == ['fail']: raise ValueError('asked')\n"
        "print(__name__, __package__, __spec__.name, value, sys.argv[1:])\n"
        "print(sys.argv[0] == __file__)\n"
    )
    (folder / "__main__.py").write_text("from . import train\n")
    cluster.execute(f"import os; before = os.getcwd(); os.chdir({str(tmp_path)!r})")
    yield "own_package"
    cluster.execute("os.chdir(before)")


def test_a_module_runs_as_with_dash_m(cluster: Cluster, package: str):
    result = cluster.run_script(f"{package}.train", ["-x", 1], module=True)
    line = f"__main__ {package} {package}.train 5 ['-x', '1']\nTrue\n"
    assert {each.stdout for each in result} == {line}
    result = cluster.run_script(package, module=True)
    assert {each.stdout for each in result} == {
        f"{package}.train {package} {package}.train 5 []\nFalse\n"
    }
    with pytest.raises(CellError, match=r"in train\.py line 3: ValueError: asked"):
        cluster.run_script(f"{package}.train", ["fail"], module=True)
    with pytest.raises(CellError, match=r"no module 'own_package\.absent'"):
        cluster.run_script(f"{package}.absent", module=True)
    with pytest.raises(CellError, match="ModuleNotFoundError"):
        cluster.run_script("absent.package", module=True)


def test_record_writes_the_error_of_each_rank(cluster: Cluster, script):
    path = script(
        """
import os
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("of rank " + os.environ["RANK"])
print(os.environ["TORCHELASTIC_ERROR_FILE"])
main()
"""
    )
    result = cluster.run_script(path, check=False)
    for each in result:
        message = json.loads(Path(each.stdout.strip()).read_text())["message"]
        assert f"ValueError: of rank {each.rank}" in message["message"]
        assert each.failure.evalue == f"of rank {each.rank}"
