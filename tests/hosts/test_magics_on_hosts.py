"""The magics over two hosts, in a real kernel, and a cluster that is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.hosts.console import Console
from tests.hosts.network import HostNetwork
from tests.processes import HANG_S, wait_until

FOLDER = "~/notebooks"
START = f"""
from pathlib import Path
from tests.notebook.test_kernel import Notebook
folder = Path({FOLDER!r}).expanduser()
folder.mkdir(exist_ok=True)
notebook = Notebook(folder)
notebook.run("%load_ext nbdist")
"""


@pytest.fixture
def console(hosts: HostNetwork) -> Iterator[Console]:
    with hosts["a"].console() as console:
        console.do(START)
        yield console
        console.do("notebook.close()")
    for name in ("a", "b"):
        wait_until(lambda name=name: hosts[name].processes() == [], HANG_S, str)


def shown(console: Console, cell: str) -> str:
    return str(console.value(f"notebook.run({cell!r}).text"))


STOP = """%%distributed
def work(x):
    y = x + 1
    breakpoint()
    return y

if rank == 1:
    work(rank)
nbdist.barrier()
"""


def conversed(console: Console, cell: str, answers: str, prompts: str) -> str:
    """Run a cell that asks. Returns what it shows.

    Args:
        answers: Python's expressions for what is answered, as for `Notebook.converse`.
        prompts: The expected prompts, as an expression.
    """
    console.do(f"reply, prompts = notebook.converse({cell!r}, {answers})")
    console.do(f"assert prompts == {prompts}, prompts")
    return str(console.value("reply.text"))


def test_a_notebook_uses_two_hosts(console: Console, hosts: HostNetwork):
    hosts["a"].write(f"{FOLDER}/hosts", "a slots=1\nb slots=1  # the other\n")
    table = shown(console, "%dist_start --hostfile hosts --device cpu")
    assert "local rank" in table
    assert "eth0" in table
    printed = shown(console, "%%distributed\nimport os; print(os.uname().nodename)")
    assert "a" in printed
    assert "b" in printed
    assert "MPI" in shown(console, "%dist_status")
    assert "hostfile" in shown(console, "%dist_config")
    shown(console, "x = 7\n%dist_push x")
    assert "7" in shown(console, "%dist_inspect x")
    pulled = shown(console, "%dist_pull x\nprint(x)")
    assert "7" in pulled
    assert shown(console, "%dist_scale -n 1").strip()
    assert "stopped" in shown(console, "%dist_stop")


def test_a_refused_start_shows_the_table_and_no_traceback(console: Console):
    text = shown(console, "%dist_start -H a:1,nowhere:1")
    assert "1 of 2 hosts cannot take part" in text
    assert "its name is not known" in text
    assert "Traceback" not in text


def test_ranks_on_two_hosts_outlive_the_kernel(console: Console, hosts: HostNetwork):
    name = "--keep 1 --name training"
    assert "training is kept" in shown(
        console, f"%dist_start -H a:1,b:1 --device cpu {name}"
    )
    shown(console, "%%distributed\nkept = rank + 5")
    console.do("notebook.manager.restart_kernel(now=True); notebook._connect()")
    shown(console, "%load_ext nbdist")
    assert "attached to training: 2 ranks" in shown(console, "%dist_attach")
    text = shown(console, "%%distributed\nnbdist.barrier(); print(kept)")
    assert "5" in text
    assert "6" in text
    shown(console, "import numpy as np; big = np.ones(1_000_000)\n%dist_push big")
    assert "1000000" in shown(console, "%dist_inspect int(big.sum())")
    assert "stopped" in shown(console, "%dist_stop")


def test_a_rank_on_another_host_stops_at_a_prompt(console: Console, hosts: HostNetwork):
    shown(console, "%dist_start -H a:1,b:1 --device cpu")
    console.do("import subprocess")
    text = conversed(console, STOP, "'p y * 100', 'n', 'c'", "['[1] (Pdb) '] * 3")
    assert "debugger on rank 1 of 2 (b)" in text
    assert "[1] 200" in text
    assert "[1] -> return y" in text
    failing = STOP.replace("breakpoint()", "[0][y]")
    assert "IndexError" in shown(console, failing)
    text = conversed(console, "%dist_debug", "'p x', 'q'", "['[1] (Pdb) '] * 2")
    assert "[1] 1" in text
    shown(console, "%%distributed\nimport os; pid = os.getpid()")
    shown(console, "%dist_pull pid")
    pids = console.value("notebook.run('pid').displays[-1]['text/plain']")
    pid = pids.strip("[]").split(",")[1]
    kill = f"lambda: subprocess.run(['ssh', 'b', 'kill -9 {pid}'], check=True)"
    assert "rank 1 of 2: RankDied" in conversed(console, STOP, kill, "['[1] (Pdb) ']")
    touch = "(folder / 'asked').touch"
    console.begin(f"reply, _ = notebook.converse({STOP!r}, {touch})")
    asked = ("sh", "-c", f"test -e {FOLDER}/asked")
    wait_until(lambda: hosts["a"].run(*asked, check=False).returncode == 0, HANG_S, str)
    hosts["b"].cut()
    console.result()
    text = console.value("reply.text")
    lost = (
        r"CellError: .* on b\) was lost with its host: .*nothing was heard for \d+ s$"
    )
    assert re.search(lost, text, re.M)
    hosts["b"].restore()
    assert "stopped" in shown(console, "%dist_stop")


def test_a_profile_has_the_ranks_of_both_hosts(console: Console, hosts: HostNetwork):
    shown(console, "%dist_start -H a:1,b:1 --device cpu")
    shown(console, f"%dist_profile --save {FOLDER}/profile.json")
    cell = "%%distributed\nfor _ in range(3): nbdist.all_reduce(torch.ones(1000))"
    text = shown(console, cell)
    assert "rank 0-1: 0 optimizer steps" in text
    assert "all_reduce" in text
    console.do(
        "import json\n"
        "events = json.loads((folder / 'profile.json').read_text())['traceEvents']"
    )
    calls = "[e['ts'] for e in events if e['ph'] == 'X' and 'all_reduce' in e['name']]"
    begun = console.value(calls)
    assert len(begun) >= 6
    # They are by the hosts' wall clocks, which a note of the start compares.
    apart_s = abs(hosts["a"].traits.clock_s - hosts["b"].traits.clock_s)
    assert (max(begun) - min(begun)) / 1e6 < apart_s + HANG_S
    names = "{e['args']['name'] for e in events if e['name'] == 'process_name'}"
    assert {"rank 0", "rank 1"} <= set(console.value(names))
    assert "stopped" in shown(console, "%dist_stop")
