"""Ranks in jobs of a real Slurm: slurmctld on one host, slurmd on two others."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest

from tests.hosts.console import Console
from tests.hosts.network import HostNetwork
from tests.hosts.slurm_network import Slurm, why_no_slurm
from tests.processes import HANG_S, wait_until

ONE_USER = True
START = """
import os, threading, time
import nbdist
from tests.hosts.notes import unless_usual
notes, seen = [], []

def started(**options):
    cluster = nbdist.Cluster(launcher="slurm", device="cpu", timeout_s=90, **options)
    cluster.on_note = unless_usual(notes)
    cluster.start(lambda p: p.waits_for and seen.append(p.waits_for))
    return cluster

def printed(code):
    return [each.stdout.strip() for each in cluster.execute(code)]
"""

RELEASE = """
import subprocess
class Seen(list):
    def append(self, place):
        super().append(place)
        subprocess.run(["scancel", "{job}"], check=True)
seen = Seen()
"""
"""Cancels the job that is in the way when the place in the queue has been seen."""

STATES = "/tmp/slurm-states"
"""The folder of the files of the tests' runs, on each host."""


def commits(path: str, steps: int) -> str:
    """A run that prints on rank 0 by which commit its file was there; 0 for none."""
    return f"""
import os, time
path = {path!r}
os.makedirs({STATES!r}, exist_ok=True)
state = nbdist.elastic.State(path=path, save_every=10**6, step=0, seen=0)

@nbdist.elastic.run
def train(state):
    while state.step < {steps}:
        if os.path.exists(path) and not state.seen:
            state.seen = state.step
        state.step += 1
        time.sleep(0.02)
        state.commit()

train(state)
print(state.seen)
"""


SUM = "x = torch.ones(5) * (rank + 1); nbdist.all_reduce(x); print(int(x[0]))"


@pytest.fixture(scope="module")
def slurm(_network: HostNetwork) -> Iterator[Slurm]:
    if reason := why_no_slurm():
        pytest.skip(reason)
    _network.ready()
    slurm = Slurm(_network, "laptop", ["b", "c"])
    yield slurm
    slurm.close()


@pytest.fixture
def console(slurm: Slurm, hosts: HostNetwork) -> Iterator[Console]:
    with slurm.console() as console:
        console.do(START)
        yield console
    slurm.empty()
    for name in ("b", "c"):
        hosts[name].run("sh", "-c", f"rm -rf {STATES}")


def test_a_job_is_submitted_and_cancelled(slurm: Slurm, console: Console):
    console.do("cluster = started(n=4, nnodes='2', time='10', job_args='--comment=x')")
    assert console.value("[i.host for i in cluster.infos]") == ["b", "b", "c", "c"]
    assert console.value(f"printed({SUM!r})") == ["10"] * 4
    assert (
        slurm.run("squeue", "-h", "-o", "%T %D %l %P %k") == "RUNNING 2 10:00 debug x"
    )
    code = "print([v for v in os.environ if v in ('SLURM_PROCID', 'SLURM_NTASKS')])"
    assert console.value(f"printed('import os; ' + {code!r})") == ["[]"] * 4
    console.do("cluster.stop()")
    assert slurm.run("squeue", "-h", "-t", "PD,R") == ""


def test_a_dead_rank_is_replaced_within_the_job(console: Console):
    console.do("cluster = started(n=2, nnodes='2')")
    raised = console.error(
        "cluster.execute('import os\\nif rank == 1: os.kill(os.getpid(), 9)')"
    )
    assert "rank 1" in raised
    assert "on c" in raised
    assert console.value(f"printed({SUM!r})") == ["3"] * 2
    console.do("cluster.stop()")


def test_the_place_in_the_queue_is_shown(slurm: Slurm, console: Console):
    blocking = slurm.block()
    console.do(RELEASE.format(job=blocking))
    console.do("cluster = started(n=2, nnodes='2')")
    assert "position 1 of 1 in partition debug" in console.value("seen[0]")
    console.do("cluster.stop()")


def test_an_interrupt_while_it_waits_cancels_the_job(slurm: Slurm, console: Console):
    slurm.block()
    console.do("main = os.getpid()")
    console.begin(
        "def later():\n"
        "    while not seen: time.sleep(0.05)\n"
        f"    os.kill(main, {int(signal.SIGINT)})\n"
        "threading.Thread(target=later).start()\n"
        "try: cluster = started(n=2, nnodes='2')\n"
        "except KeyboardInterrupt: interrupted = True"
    )
    console.result()
    assert console.value("interrupted")
    assert slurm.run("squeue", "-h", "-t", "PD", "-o", "%j") == ""


def test_an_allocation_is_used_as_it_is(slurm: Slurm, console: Console):
    job = slurm.block()
    variables = {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), job),
        **dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST"), "b,c"),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "2"),
        **{"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"},
    }
    console.do(f"os.environ.update({variables})")
    console.do("cluster = started()")
    assert console.value("[i.host for i in cluster.infos]") == ["b", "b", "c", "c"]
    assert console.value(f"printed({SUM!r})") == ["10"] * 4
    console.do("cluster.stop()")
    assert slurm.run("squeue", "-h", "-o", "%i %T") == f"{job} RUNNING"


def test_the_time_limit_is_told_before_it_comes(slurm: Slurm, console: Console):
    console.do("cluster = started(n=2, nnodes='2', time='2')")
    console.begin(
        "end = time.monotonic() + 60\n"
        "while not notes and time.monotonic() < end: time.sleep(0.05)"
    )
    console.result()
    assert "Slurm ends job" in console.value("notes[-1]")
    code = commits(f"{STATES}/limit.state", 50)
    saved = console.value(f"printed({code!r})[0]")
    assert 0 < int(saved) < 50
    console.do("cluster.stop()")


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGUSR1"])
def test_ranks_commit_at_a_signal_and_go_on(
    slurm: Slurm, console: Console, signal_name: str
):
    console.do("cluster = started(n=2, nnodes='2')")
    job = slurm.run("squeue", "-h", "-o", "%i")
    code = commits(f"{STATES}/{signal_name}.state", 500)
    console.begin(f"seen = printed({code!r})")
    slurm.run("scancel", f"--signal={signal_name}", job)
    console.result()
    assert 0 < int(console.value("seen[0]")) < 500, console.value("notes")
    # The job has no time limit.
    note = f"Slurm has sent {signal_name} to job {job}: pull or save"
    assert note in console.value("notes[0]")
    assert console.value(f"printed({SUM!r})") == ["3"] * 2
    console.do("cluster.stop()")


@pytest.mark.parametrize("limit", ["365-00:00:00", "UNLIMITED"])
def test_a_pre_empted_job_commits_in_its_grace_time(
    slurm: Slurm, console: Console, limit: str
):
    console.do("cluster = started(n=2, nnodes='2')")
    # Slurm gives a job without a limit either of these, as it happens to start.
    job = slurm.run("squeue", "-h", "-t", "R", "-o", "%i")
    slurm.run("scontrol", "update", f"jobid={job}", f"timelimit={limit}")
    code = commits(f"{STATES}/preempted{limit}.state", 300)
    console.begin(f"seen = printed({code!r})")
    slurm.submit("urgent")
    console.result()
    assert 0 < int(console.value("seen[0]")) < 300
    (note,) = console.value("notes")
    assert "Slurm has sent SIGTERM" in note
    found = re.search(r"which ends in (\d+) s", note)
    assert found, note
    assert 10 < int(found[1]) <= 20
    raised = console.error("cluster.execute('import time; time.sleep(100)')")
    assert "rank 0" in raised
    assert "was lost with its host: Slurm ends job" in raised
    wait_until(lambda: "PREEMPTED" in console.value("str(notes)"), HANG_S, str)


def test_a_cancelled_run_commits_before_it_ends(
    slurm: Slurm, console: Console, hosts: HostNetwork
):
    console.do("cluster = started(n=2, nnodes='2', on_failure='stop')")
    code = commits(f"{STATES}/cancelled.state", 10**6)
    code = code.replace("\ntrain(", f"\nopen('{STATES}/began', 'w'); train(")
    console.begin(
        f"try: cluster.execute({code!r})\n"
        "except nbdist.errors.NbdistError as error: raised = str(error)"
    )
    began = ("test", "-e", f"{STATES}/began")
    run = hosts["b"].run
    wait_until(lambda: run(*began, check=False).returncode == 0, 60.0, str)
    slurm.run("scancel", slurm.run("squeue", "-h", "-o", "%i"))
    console.result()
    assert "rank 0" in console.value("raised")
    wait_until(lambda: "CANCELLED" in console.value("str(notes)"), HANG_S, str)
    run("test", "-s", f"{STATES}/cancelled.state")


def test_a_drained_node_keeps_its_ranks_and_gets_no_others(
    slurm: Slurm, console: Console
):
    drain = ("scontrol", "update", "NodeName=b", "State=DRAIN", "Reason=test")
    console.do("cluster = started(n=2, nnodes='2')")
    slurm.run(*drain)
    assert console.value(f"printed({SUM!r})") == ["3"] * 2
    console.do("cluster.stop(); seen.clear()")
    console.begin("cluster = started(n=2, nnodes='2')")
    waits = ("squeue", "-h", "-t", "PD", "-o", "%r")
    wait_until(
        lambda: "DRAINED" in slurm.run(*waits), HANG_S, lambda: slurm.run(*waits)
    )
    slurm.run("scontrol", "update", "NodeName=b", "State=RESUME")
    console.result()
    assert "DRAINED" in console.value("' '.join(seen)")
    assert console.value(f"printed({SUM!r})") == ["3"] * 2
    console.do("cluster.stop()")


@pytest.mark.slow
def test_a_job_at_its_time_limit_takes_its_ranks(slurm: Slurm, console: Console):
    console.do("cluster = started(n=2, nnodes='2', time='1', on_failure='stop')")
    console.begin(
        "try: cluster.execute('import time; time.sleep(300)')\n"
        "except nbdist.errors.NbdistError as error: raised = str(error)"
    )
    console.result()
    raised, notes = console.value("raised"), console.value("notes")
    assert "rank 0" in raised
    assert "was lost with its host: Slurm ends job" in raised
    assert any("s: pull or save what you need" in note for note in notes)
    assert slurm.run("squeue", "-h", "-t", "R", "-o", "%i") == ""


@pytest.mark.parametrize(
    "how",
    [
        "cancelled",
        pytest.param("pre-empted", marks=pytest.mark.slow),
        pytest.param("down", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_ends_takes_its_ranks(slurm: Slurm, console: Console, how: str):
    console.do("cluster = started(n=2, nnodes='2', on_failure='stop')")
    job = slurm.run("squeue", "-h", "-o", "%i")
    console.begin(
        "try: cluster.execute('import time; time.sleep(100)')\n"
        "except nbdist.errors.NbdistError as error: raised = str(error)"
    )
    if how == "cancelled":
        slurm.run("scancel", job)
    elif how == "pre-empted":
        slurm.submit("urgent")
    else:
        slurm.run("scontrol", "update", "NodeName=b", "State=DOWN", "Reason=test")
    console.result()
    raised = console.value("raised")
    assert "Slurm" in raised or "srun" in raised
    assert "rank 0" in raised


@pytest.mark.slow
def test_a_job_that_ends_is_submitted_again(slurm: Slurm, console: Console):
    console.do("cluster = started(n=2, nnodes='2')")
    job = slurm.run("squeue", "-h", "-o", "%i")
    console.begin(
        "try: cluster.execute('import time; time.sleep(100)')\n"
        "except nbdist.errors.NbdistError as error: raised = str(error)"
    )
    slurm.run("scancel", job)
    console.result()
    assert "rank 0" in console.value("raised")
    assert console.value(f"printed({SUM!r})") == ["3"] * 2
    assert slurm.run("squeue", "-h", "-t", "R", "-o", "%i") not in ("", job)
    console.do("cluster.stop()")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("n=2, partition='absent'", "invalid partition"),
        ("n=2, gres='gpu:1'", "gres"),
        ("n=2, hosts='b:2'", "has its own hosts"),
    ],
)
def test_a_refused_job_says_why(console: Console, options: str, reason: str):
    assert reason in console.error(f"started({options})")
