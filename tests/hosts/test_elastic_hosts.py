"""Hosts that join and leave while a cell trains, and a script that names them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.hosts.console import Console
from tests.hosts.network import HostNetwork
from tests.processes import HANG_S, wait_until

TRAIN = """
import time
inputs = torch.randn(240, 8, generator=torch.Generator().manual_seed(1))
targets = torch.randn(240, 4, generator=torch.Generator().manual_seed(2))
sizes = []

def make_state():
    torch.manual_seed(rank)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = nbdist.elastic.Sampler(240, 12)
    return nbdist.elastic.State(
        model=model, optimizer=optimizer, sampler=sampler, step=0
    )

@nbdist.elastic.run
def train(state):
    sizes.append(nbdist.size())
    print("size", nbdist.size(), "from step", state.step)
    ddp = torch.nn.parallel.DistributedDataParallel(state.model)
    while state.step < EPOCHS * 20:
        for indices in state.sampler:
            weight = nbdist.size() * len(indices) / 12
            loss = (ddp(inputs[indices]) - targets[indices]).square().mean() * weight
            state.optimizer.zero_grad(); loss.backward(); state.optimizer.step()
            state.sampler.advance()
            state.step += 1
            if rank == 0: open("/tmp/step", "w").write(str(state.step))
            time.sleep(PAUSE)
            state.commit()
        state.sampler.end_epoch()

state = make_state()
train(state)
"""
APART = (
    "max(float((w - wanted).abs().max()) "
    "for w in cluster['state.model.weight.detach()'])"
)
"""The largest difference of a weight from that of an undisturbed training."""
START = """
import os, threading, time
import torch
import nbdist
from tests.hosts.notes import unless_usual
notes = []

def started(**options):
    options = {"device": "cpu", "timeout_s": 90, "host_timeout_s": 4.0, **options}
    cluster = nbdist.Cluster(**options)
    cluster.on_note = unless_usual(notes)
    return cluster.start()

def printed(code, **options):
    return [each.stdout.strip() for each in cluster.execute(code, **options)]

def await_hosts():
    "Wait until the hosts that the script prints have been looked at."
    end = time.monotonic() + 60
    while cluster._discovered is None:
        assert time.monotonic() < end
        time.sleep(0.02)

def await_step(step):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if int(open("/tmp/step").read() or 0) >= step: return
        except FileNotFoundError:
            pass
        time.sleep(0.02)
    raise TimeoutError(step)
"""


@pytest.fixture
def console(hosts: HostNetwork) -> Iterator[Console]:
    hosts["a"].run("rm", "-f", "/tmp/step")
    with hosts["a"].console() as console:
        console.do(START)
        yield console
        console.do("cluster.stop()")


def training(epochs: int, pause_s: float) -> str:
    return TRAIN.replace("EPOCHS", str(epochs)).replace("PAUSE", str(pause_s))


def weights_undisturbed(console: Console, epochs: int) -> None:
    console.do(
        "reference = nbdist.Cluster(1, device='cpu').start()\n"
        f"reference.execute({training(epochs, 0.0)!r})\n"
        "wanted = reference['state.model.weight.detach()'][0]\n"
        "reference.stop()"
    )


def test_one_three_and_two_hosts_within_one_cell(console: Console):
    weights_undisturbed(console, 6)
    console.do("os.path.exists('/tmp/step') and os.remove('/tmp/step')")
    console.do("cluster = started(hosts='a:1,b:1', n=1)")
    console.do(
        f"cell = cluster.execute({training(6, 0.15)!r}, wait=False)\n"
        "await_step(5)\n"
        "notes.append(cluster.scale(hosts='a:1,b:2,c:1'))\n"
        "await_step(60)\n"
        "notes.append(cluster.scale(hosts='a:1,c:1'))\n"
        "result = cell.result(60)"
    )
    assert console.value("cluster['sizes'][0]") == [1, 4, 2]
    assert console.value("[i.host for i in cluster.infos]") == ["a", "c"]
    assert console.value("cluster['state.step']") == [120] * 2
    assert console.value(APART) < 1e-5


def test_a_training_survives_the_death_of_a_host(console: Console, hosts: HostNetwork):
    weights_undisturbed(console, 4)
    console.do("os.path.exists('/tmp/step') and os.remove('/tmp/step')")
    console.do("cluster = started(hosts='a:1,b:2,c:1', n=3)")
    console.do(
        f"cell = cluster.execute({training(4, 0.05)!r}, wait=False); await_step(10)"
    )
    hosts["b"].kill()
    console.do("result = cell.result(60)")
    # One of the two ranks of the lost host found the free slot of c.
    assert console.value("[i.host for i in cluster.infos]") == ["a", "c"]
    assert console.value("cluster['state.step']") == [80] * 2
    assert console.value("cluster['sizes'][0]") == [3, 2]
    assert console.value(APART) < 1e-5


def test_the_last_commit_is_brought_from_another_host(
    console: Console, hosts: HostNetwork
):
    """The commits of a rank 0 elsewhere outlive all ranks."""
    weights_undisturbed(console, 4)
    console.do("cluster = started(hosts='b:1,c:1')")
    console.do(f"cell = cluster.execute({training(4, 0.05)!r}, wait=False)")
    steps = lambda: hosts["b"].run("cat", "/tmp/step", check=False).stdout  # noqa: E731
    wait_until(lambda: int(steps() or 0) >= 10, HANG_S, str)
    console.do(
        "import psutil\n"
        "launchers = [p for p in psutil.process_iter() if p.name() == 'prterun']\n"
        "launchers[0].kill(); result = cell.result(90)"
    )
    assert "continues from its commit" in str(console.value("notes"))
    assert console.value("cluster['state.step']") == [80] * 2
    assert "from step 0" not in str(console.value("result[0].stdout"))
    assert console.value(APART) < 1e-5


SCRIPT = "/var/tmp/hosts.sh"


def prints(hosts: HostNetwork, *lines: str) -> None:
    """Make the discovery script print these lines from now on."""
    text = "\n".join(["#!/bin/sh", *(f"echo {line}" for line in lines)])
    hosts["a"].write(f"{SCRIPT}.new", text + "\n", mode="755")
    hosts["a"].run("mv", f"{SCRIPT}.new", SCRIPT)


def test_ranks_follow_a_script_that_prints_the_hosts(
    console: Console, hosts: HostNetwork
):
    prints(hosts, "a:1")
    console.do(f"cluster = started(host_discovery={SCRIPT!r})")
    console.do("cluster.execute('kept = 3')")
    assert console.value("cluster['kept']") == [3]
    prints(hosts, "a:1", "b:1")
    time.sleep(3)
    assert console.value("cluster['kept']") == [3, 3]
    assert console.value("[i.host for i in cluster.infos]") == ["a", "b"]
    # While a cell trains, at the next commit.
    console.do(
        f"cell = cluster.execute({training(8, 0.05)!r}, wait=False); await_step(5)"
    )
    prints(hosts, "a:1", "b:1", "c:2")
    console.do("cell.result(90)")
    assert console.value("cluster['sizes'][0]") == [2, 4]
    prints(hosts, "c:1")
    time.sleep(3)
    assert console.value("printed('print(kept)')") == ["3"]
    assert console.value("[i.host for i in cluster.infos]") == ["c"]
    wait_until(lambda: hosts["b"].processes() == [], HANG_S, str)


def test_n_is_the_most_ranks_on_hosts_that_a_script_prints(
    console: Console, hosts: HostNetwork
):
    prints(hosts, "a:1")
    console.do(f"cluster = started(n=3, host_discovery={SCRIPT!r})")
    assert console.value("[i.host for i in cluster.infos]") == ["a"]
    prints(hosts, "a:1", "b:2", "c:2")
    console.do("await_hosts()")
    assert console.value("printed('print(rank)')") == [*"012"]
    assert console.value("[i.host for i in cluster.infos]") == ["a", "b", "b"]


def start_while_b_is_down(console: Console, hosts: HostNetwork) -> None:
    """Start on the hosts that the script prints, of which only one can be reached."""
    console.do("import nbdist.clusters.hosts.hosts as h; h.AGAIN_S = 1.0")
    hosts["b"].block(f"tcp dport {hosts['b'].traits.port}")
    prints(hosts, "a:1", "b:1")
    console.do(f"cluster = started(host_discovery={SCRIPT!r}, timeout_s=30)")
    assert console.value("[i.host for i in cluster.infos]") == ["a"]


def test_a_host_that_cannot_take_part_keeps_no_other_out(
    console: Console, hosts: HostNetwork
):
    start_while_b_is_down(console, hosts)
    prints(hosts, "a:1", "b:1", "c:1", "nowhere:1")
    console.do("await_hosts()")
    assert console.value("printed('print(rank)')") == [*"01"]
    assert console.value("[i.host for i in cluster.infos]") == ["a", "c"]
    said = console.value("notes")
    for name, why in (("b", "cannot be reached"), ("nowhere", "its name is not known")):
        (note,) = [each for each in said if f"host {name} takes no part" in each]
        assert why in note
    hosts["b"].unblock()
    console.do("await_hosts()")
    assert console.value("printed('print(rank)')") == [*"012"]
    assert sorted(console.value("[i.host for i in cluster.infos]")) == ["a", "b", "c"]


def test_a_listed_host_gets_its_ranks_when_it_is_there(
    console: Console, hosts: HostNetwork
):
    """Whether it was down at the start, or is lost; the script prints it always."""
    start_while_b_is_down(console, hosts)
    hosts["b"].unblock()
    console.do("await_hosts()")
    assert console.value("printed('print(rank)')") == [*"01"]
    hosts["b"].kill()
    console.do("while len(cluster.infos) == 2: cluster.execute('1', check=False)")
    hosts["b"].start()
    console.do("await_hosts()")
    assert console.value("printed('nbdist.barrier(); print(rank)')") == [*"01"]
    assert console.value("[i.host for i in cluster.infos]") == ["a", "b"]


def test_hosts_that_come_before_a_cells_elastic_run_join_it(
    console: Console, hosts: HostNetwork
):
    prints(hosts, "a:1")
    console.do(f"cluster = started(host_discovery={SCRIPT!r})")
    console.do("cluster.execute('import os')")
    # Not on the rank that joins.
    wait = "while nbdist.size() == 1 and not os.path.exists('/tmp/go'): pass\n"
    code = "import time\n" + wait + training(8, 0.05)
    console.do(f"cell = cluster.execute({code!r}, wait=False)")
    prints(hosts, "a:1", "c:1")
    console.do("await_hosts(); open('/tmp/go', 'w').close(); cell.result(90)")
    hosts["a"].run("rm", "/tmp/go")
    assert console.value("cluster['sizes'][0]") == [1, 2]


def test_a_start_may_leave_out_hosts_that_do_not_answer(
    console: Console, hosts: HostNetwork
):
    hosts["b"].block(f"tcp dport {hosts['b'].traits.port}")
    console.do("cluster = started(hosts='a:1,b:1,c:1', nnodes='2:3', timeout_s=30)")
    assert console.value("[i.host for i in cluster.infos]") == ["a", "c"]
    assert "host b takes no part: cannot be reached" in console.value("str(notes)")
    hosts["b"].unblock()
    console.do("note = cluster.scale(3)")
    assert console.value("[i.host for i in cluster.infos]") == ["a", "c", "b"]
    assert console.value("printed('nbdist.barrier(); print(1)')") == ["1"] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("scale(hosts='a:1,nowhere:1')", "its name is not known"),
        ("scale(5, hosts='a:1,b:1')", "free slots"),
        ("scale()", "-n None: expected a whole number"),
    ],
)
def test_a_change_that_is_not_possible_changes_nothing(
    console: Console, call: str, message: str
):
    console.do("cluster = started(hosts='a:1,b:1')")
    assert message in console.error(f"cluster.{call}")
    assert console.value("[i.host for i in cluster.infos]") == ["a", "b"]
    assert console.value("printed('nbdist.barrier(); print(1)')") == ["1"] * 2


@pytest.mark.parametrize(
    ("first", "then", "where"),
    [
        ("b:1", "localhost:1,b:1", ["b", "a"]),
        ("b:1", "b:1,a:2", ["b", "a", "a"]),
        ("a:1,b:1", "localhost:2,b:1", ["a", "b", "a"]),
    ],
)
def test_the_notebooks_own_host_may_come_later_or_by_another_name(
    console: Console, first: str, then: str, where: list[str]
):
    console.do(f"cluster = started(hosts={first!r})")
    console.do(f"cluster.scale(hosts={then!r})")
    assert console.value("[i.host for i in cluster.infos]") == where
    ranks = [str(rank) for rank in range(len(where))]
    assert console.value("printed('nbdist.barrier(); print(rank)')") == ranks


def test_the_python_of_a_host_can_be_corrected(console: Console, hosts: HostNetwork):
    console.do("cluster = started(hosts='a:1,c:1')")
    wrong = "hosts='a:1,b:1:python=/srv/no/python'"
    assert "has no /srv/no/python" in console.error(f"cluster.scale({wrong})")
    right = f"hosts='a:1,b:1:python={hosts['b'].python}'"
    console.do(f"cluster.scale({right})")
    assert console.value("[i.host for i in cluster.infos]") == ["a", "b"]


def test_a_start_again_needs_no_host_that_has_no_rank(
    console: Console, hosts: HostNetwork
):
    console.do("cluster = started(hosts='a:1,b:1')")
    hosts["b"].kill()
    console.do("pid = cluster.infos[0].pid")
    error = console.error("cluster.restart()")
    assert re.search(r"^  b +(cannot be reached|refuses the connection) ", error, re.M)
    assert "The ranks go on" in error
    console.do("while len(cluster.infos) == 2: cluster.execute('1', check=False)")
    assert console.value("cluster.infos[0].pid == pid")
    console.do("cluster.restart()")
    assert console.value("[i.host for i in cluster.infos]") == ["a"]
    assert not console.value("cluster.infos[0].pid == pid")
    assert "host b takes no part" in console.value("str(notes)")
    hosts["b"].start()
    console.do("cluster.scale(2)")
    assert console.value("[i.host for i in cluster.infos]") == ["a", "b"]


def test_a_cluster_of_one_host_gets_no_other(console: Console):
    console.do("cluster = nbdist.Cluster(1, device='cpu').start()")
    error = console.error("cluster.scale(hosts='a:1,b:1')")
    assert "was started on this host alone" in error
