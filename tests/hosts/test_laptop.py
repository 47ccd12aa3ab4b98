"""A notebook on a laptop, and all ranks on other hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.console import Console
from tests.hosts.network import HostNetwork

PROJECT = "~/project"
START = f"""
import os, sys, time
import nbdist
from tests.hosts.notes import unless_usual
sys.path.insert(0, '')
os.chdir(os.path.expanduser({PROJECT!r}))
notes = []
cluster = nbdist.Cluster(hosts="a:2,b:2", sync=".", device="cpu", timeout_s=90)
cluster.on_note = unless_usual(notes)
cluster.start()
cluster.execute("import os", setup=True)

def printed(code, **options):
    return [each.stdout.strip() for each in cluster.execute(code, **options)]
"""


@pytest.fixture(scope="module")
def console(_network: HostNetwork) -> Iterator[Console]:
    _network.ready()
    laptop = _network["laptop"]
    # No other host may connect to the laptop: it makes outgoing connections only.
    laptop.block("ct state new iifname eth0")
    laptop.write(f"{PROJECT}/helper.py", "def answer(): return 41\n")
    laptop.write(f"{PROJECT}/sub/data.txt", "a line\n")
    laptop.write(
        f"{PROJECT}/train.py",
        "import sys, helper\nprint(helper.answer(), *sys.argv[1:])\n",
    )
    with laptop.console() as console:
        console.do(START)
        yield console
        console.do("cluster.stop()")
    _network.ready()
    for name in ("a", "b", "laptop"):
        assert _network[name].processes() == []


def test_no_rank_runs_on_the_laptop(console: Console, hosts: HostNetwork):
    hosts["laptop"].block("ct state new iifname eth0")
    assert console.value("[i.host for i in cluster.infos]") == ["a", "a", "b", "b"]
    assert not any("nbdist rank" in line for line in hosts["laptop"].processes()
                   if "host" not in line)  # fmt: skip
    assert console.value("printed('nbdist.barrier(); print(rank)')") == [*"0123"]


def test_the_ranks_import_the_modules_of_the_notebooks_folder(console: Console):
    assert (
        console.value("printed('import helper; print(helper.answer())')") == ["41"] * 4
    )
    assert (
        console.value("printed('print(open(\"sub/data.txt\").read())')")
        == ["a line"] * 4
    )


def test_a_synchronized_folder_without_the_notebook_is_noted(console: Console):
    console.do("os.makedirs('../apart', exist_ok=True)")
    given = "1, hosts='a:1', sync='../apart', device='cpu'"
    console.do(f"other = nbdist.Cluster({given}); other.on_note = notes.append")
    console.do("other.start(); other.stop()")
    assert "ranks elsewhere do not import from the copy" in console.value("str(notes)")


def test_an_edit_reaches_the_next_cell(console: Console, hosts: HostNetwork):
    console.do("printed('import helper')")
    hosts["laptop"].write(f"{PROJECT}/helper.py", "def answer(): return 42 * 1\n")
    code = "import importlib; importlib.reload(helper); print(helper.answer())"
    assert console.value(f"printed({code!r})") == ["42"] * 4


def test_a_script_runs_with_its_modules(console: Console):
    console.do("r = cluster.run_script('train.py', ['--fast'])")
    assert console.value("[each.stdout.split()[1] for each in r]") == ["--fast"] * 4


def test_a_script_outside_of_the_folder_is_missed_by_name(
    console: Console, hosts: HostNetwork
):
    hosts["laptop"].write("/tmp/elsewhere.py", "")
    error = console.error("cluster.run_script('/tmp/elsewhere.py')")
    assert "host a has no /tmp/elsewhere.py: start the cluster with --sync" in error


def test_values_and_functions_travel(console: Console):
    console.do("import numpy as np; cluster.push(big=np.arange(500_000))")
    assert console.value("cluster['int(big.sum())']") == [sum(range(500_000))] * 4
    assert console.value("[len(v) for v in cluster['big']]") == [500_000] * 4
    assert console.value("cluster.run(lambda: os.uname().nodename)") == [
        "a",
        "a",
        "b",
        "b",
    ]


def test_files_that_ranks_write_stay_on_their_host(
    console: Console, hosts: HostNetwork
):
    console.do('printed(\'open(f"made-{rank}", "w").write("x")\')')
    listed = hosts["b"].run("sh", "-c", "ls ~/.cache/nbdist/sync/*").stdout
    assert "made-2" in listed
    assert "made-0" not in listed


def test_a_dead_rank_is_replaced(console: Console):
    console.do("cluster.execute('kept = 5')")
    error = console.error("cluster.execute('if rank == 0: os.kill(os.getpid(), 9)\\n'\n"
                          "'nbdist.barrier()')")  # fmt: skip
    assert "rank 0" in error
    assert console.value("cluster['kept']") == [5] * 4
    assert console.value("printed('nbdist.barrier(); print(1)')") == ["1"] * 4


def test_the_laptop_listens_to_nobody(console: Console, hosts: HostNetwork):
    listening = hosts["laptop"].run("ss", "-Hlnt").stdout.splitlines()
    addresses = [line.split()[3] for line in listening]
    port = hosts["laptop"].traits.port
    known = ("127.0.0.1", f"0.0.0.0:{port}", f"[::]:{port}")
    outside = [a for a in addresses if not a.startswith(known)]
    assert [a for a in outside if "%lo" not in a] == []
