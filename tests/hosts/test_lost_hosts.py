"""A host that is lost takes its ranks and no more."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.hosts.console import Console
from tests.hosts.network import HostNetwork
from tests.processes import HANG_S, wait_until

SILENCE_S = 4.0
START = f"""
import os, signal, subprocess, time
import nbdist
from tests.hosts.notes import unless_usual
notes = []
cluster = nbdist.Cluster(
    hosts="a:2,b:2", device="cpu", timeout_s=90, host_timeout_s={SILENCE_S}
)
cluster.on_note = unless_usual(notes)
cluster.start()
cluster.execute("import os; kept = rank", setup=True)

def printed(code, **options):
    return [each.stdout.strip() for each in cluster.execute(code, **options)]
"""
WAIT = "for _ in range(600): nbdist.barrier(); __import__('time').sleep(0.05)"


@pytest.fixture
def console(hosts: HostNetwork) -> Iterator[Console]:
    with hosts["a"].console() as console:
        console.do(START)
        yield console
        console.do("cluster.stop()")
    wait_until(lambda: hosts["a"].processes() == [], HANG_S, str)


def is_clean(hosts: HostNetwork, name: str) -> None:
    """Wait until a host has ended its part of the cluster by itself."""
    host = hosts[name]
    wait_until(
        lambda: host.processes() == [], SILENCE_S + 10, lambda: f"{host.processes()}"
    )
    assert host.left_behind() == set()


def test_a_killed_host_takes_its_ranks_and_no_more(
    hosts: HostNetwork, console: Console
):
    console.begin(f"cluster.execute({WAIT!r})")
    time.sleep(1.5)
    hosts["b"].kill()
    _, _, error = console._answer()
    assert "nothing was heard" not in error
    assert "on b) was lost with its host" in error
    assert console.value("[(i.rank, i.host) for i in cluster.infos]") == [
        (0, "a"),
        (1, "a"),
    ]
    assert console.value("cluster['kept']") == [0, 1]
    assert console.value("printed('nbdist.barrier(); print(world_size)')") == ["2"] * 2
    # The host comes back, and so do its ranks.
    hosts["b"].start()
    console.do("note = cluster.scale(4)")
    assert console.value("[i.host for i in cluster.infos]") == ["a", "a", "b", "b"]
    assert console.value("printed('nbdist.barrier(); print(kept)')") == [
        "0",
        "1",
        "0",
        "0",
    ]


def test_a_link_that_is_cut(hosts: HostNetwork, console: Console):
    console.begin(f"cluster.execute({WAIT!r})")
    time.sleep(1.5)
    hosts["b"].cut()
    _, _, error = console._answer()
    assert "on b) was lost with its host" in error
    assert f"nothing was heard for {SILENCE_S:g} s" in error
    assert console.value("printed('nbdist.barrier(); print(kept)')") == ["0", "1"]
    is_clean(hosts, "b")  # still cut off
    hosts["b"].restore()
    console.do("cluster.scale(4)")
    assert console.value("printed('nbdist.barrier(); print(rank)')") == [*"0123"]


def test_a_link_that_is_cut_for_a_moment_changes_nothing(
    hosts: HostNetwork, console: Console
):
    console.begin(
        "out = printed('''for _ in range(60):\\n    nbdist.barrier()\\n"
        "    __import__('time').sleep(0.05)\\nprint(rank)''')"
    )
    time.sleep(1)
    hosts["b"].cut()
    time.sleep(SILENCE_S / 3)
    hosts["b"].restore()
    console.result()
    assert console.value("out") == [*"0123"]
    assert console.value("notes") == []


def test_ranks_that_get_other_numbers_are_named_by_both(hosts: HostNetwork):
    start = START.replace('hosts="a:2,b:2"', '4, hosts="a:2,b:2,c:1"')
    with hosts["laptop"].console() as console:
        console.do(start)
        console.begin(f"cluster.execute({WAIT!r})")
        hosts["a"].cut()
        _, _, error = console._answer()
        assert "rank 0 was replaced" in error
        assert "rank 1 was dropped" in error
        assert "it has the variables of rank 1 (rank 2 before)" in error
        assert console.value("[i.host for i in cluster.infos]") == ["c", "b", "b"]
        assert console.value("cluster['kept']") == [2, 2, 3]
        console.do("cluster.stop()")


def test_a_slow_link_is_slow_and_no_more(hosts: HostNetwork, console: Console):
    hosts["b"].slow("20mbit")
    console.do("import numpy as np; cluster.push(v=np.ones(500_000))")
    assert console.value("printed('print(v.sum())')") == ["500000.0"] * 4
    code = "x = torch.ones(300_000); nbdist.all_reduce(x); print(x[0].item())"
    assert console.value(f"printed({code!r})") == ["4.0"] * 4


HELPERS = {
    "agent": "nbdist agent",
    "process supervisor": "nbdist.clusters.process_supervisor",
    "rank host": "nbdist rank host",
}


@pytest.mark.parametrize("helper", HELPERS)
def test_a_helper_on_another_host_that_dies_takes_that_host_only(
    hosts: HostNetwork, console: Console, helper: str
):
    console.do("pids = [info.pid for info in cluster.infos]")
    hosts["b"].run("pkill", "-9", "-f", HELPERS[helper])
    wait = (
        "end = time.monotonic() + 15\n"
        "while len(cluster.died()) < 2 and time.monotonic() < end: time.sleep(0.05)"
    )
    console.do(wait)
    assert console.value("sorted(cluster.died())") == [2, 3]
    console.do("out = printed('nbdist.barrier(); print(kept)')")
    assert console.value("[info.pid for info in cluster.infos[:2]] == pids[:2]")
    if helper != "rank host":
        is_clean(hosts, "b")


def test_the_link_process_that_dies_takes_its_host_only(
    hosts: HostNetwork, console: Console
):
    hosts["a"].run("pkill", "-9", "-f", "nbdist link to b")
    console.do(
        "end = time.monotonic() + 15\n"
        "while len(cluster.died()) < 2 and time.monotonic() < end: time.sleep(0.05)"
    )
    assert console.value("printed('nbdist.barrier(); print(kept)')") == ["0", "1"]
    is_clean(hosts, "b")


def test_an_interpreter_that_ends_ends_the_ranks_and_prints_nothing(
    hosts: HostNetwork,
):
    cells = "%load_ext nbdist\n%dist_start -H a:1,b:1 --device cpu\n"
    hosts["a"].write("~/cells.ipy", cells)
    program = (hosts["a"].python, "-m", "IPython", "--colors=NoColor", "cells.ipy")
    ended = hosts["a"].run(*program)
    assert "2 ranks" in ended.stdout or "started in" in ended.stdout
    assert "Traceback" not in ended.stderr + ended.stdout
    for name in ("a", "b"):
        assert hosts[name].processes() == []
        assert hosts[name].left_behind() == set()


def test_no_process_is_left_when_the_notebook_is_killed(hosts: HostNetwork):
    with hosts["a"].console() as console:
        console.do(START)
        hosts["a"].run("pkill", "-9", "-f", "console.py")
        with pytest.raises(AssertionError, match="the interpreter has ended"):
            console.result()
    for name in ("a", "b"):
        is_clean(hosts, name)
