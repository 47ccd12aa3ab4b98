"""Ranks in jobs of PBS, Grid Engine, LSF and HTCondor, with stand-ins for the commands.

The stand-ins run the job's script, and the ranks are real. No real system of these is
asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.clusters.hosts.batch_job import BatchJob
from nbdist.clusters.hosts.lsf import LsfJob
from nbdist.clusters.hosts.pbs import PbsJob
from nbdist.clusters.hosts.sge import SgeJob
from nbdist.config import ClusterConfig
from tests.hosts.batch_commands import INSTALL
from tests.hosts.console import Console
from tests.hosts.network import HostNetwork
from tests.hosts.test_slurm import SUM
from tests.processes import HANG_S, wait_until

ONE_USER = True
FOLDER = "/var/tmp/batch"
START = """
import nbdist
from tests.hosts.notes import unless_usual
notes, seen = [], []

def started(launcher, **options):
    cluster = nbdist.Cluster(launcher=launcher, device="cpu", timeout_s=90, **options)
    cluster.on_note = unless_usual(notes)
    cluster.start(lambda p: p.waits_for and seen.append(p.waits_for))
    return cluster

def printed(code):
    return [each.stdout.strip() for each in cluster.execute(code)]
"""
SYSTEMS = {
    "pbs": "n=4, nnodes='2', time='10:00', account='a', gres='gpu:1'",
    "sge": "n=4, job_args='-pe mpi 4', time='0:10:0', account='a'",
    "lsf": "n=4, nnodes='2', time='10', account='a', gres='gpu:1'",
    "htcondor": "n=4, nnodes='2', account='a', gres='gpu:1'",
}
SCRIPTS = {
    "pbs": (
        "select=2:ncpus=2:mpiprocs=2:ngpus=1", "place=scatter", "walltime=10:00",
        "#PBS -A a",
    ),
    "sge": ("#$ -pe mpi 4", "h_rt=0:10:0", "#$ -A a"),
    "lsf": (
        "#BSUB -n 4", 'span[ptile=2]"', "#BSUB -W 10", "#BSUB -P a",
        '#BSUB -gpu "num=1"',
    ),
    "htcondor": (),
}  # fmt: skip


@pytest.fixture
def console(hosts: HostNetwork) -> Iterator[Console]:
    laptop = hosts["laptop"]
    laptop.run("sh", "-c", f"rm -rf {FOLDER}; mkdir -p {FOLDER}")
    laptop.run("sh", "-c", INSTALL, FOLDER)
    path = laptop.environment["PATH"]
    variables = {"PATH": f"{FOLDER}:{path}", "BATCH_FOLDER": FOLDER}
    with laptop.console(**variables) as console:
        console.do(START)
        yield console


def script_of(hosts: HostNetwork) -> str:
    return hosts["laptop"].run("sh", "-c", f"cat {FOLDER}/script.*").stdout


def is_unused(hosts: HostNetwork) -> bool:
    return not any(
        "nbdist" in line or "batch-job" in line
        for name in ("b", "c")
        for line in hosts[name].processes()
    )


@pytest.mark.parametrize(
    "system",
    [
        "pbs",
        pytest.param("sge", marks=pytest.mark.slow),
        pytest.param("lsf", marks=pytest.mark.slow),
        "htcondor",
    ],
)
def test_a_job_is_submitted_and_cancelled(
    hosts: HostNetwork, console: Console, system: str
):
    console.do(f"cluster = started({system!r}, {SYSTEMS[system]})")
    assert console.value("[i.host for i in cluster.infos]") == ["b", "b", "c", "c"]
    assert console.value(f"printed({SUM!r})") == ["10"] * 4
    script = script_of(hosts)
    for line in SCRIPTS[system]:
        assert line in script
    assert any("batch-job-41" in line for line in hosts["b"].processes())
    console.do("cluster.stop()")
    state = f"cat {FOLDER}/job.41"
    assert '"ended"' in hosts["laptop"].run("sh", "-c", state).stdout
    wait_until(lambda: is_unused(hosts), HANG_S, str)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "said"),
    [
        ("pbs", "job 41 waits in the queue of PBS: Not Running: not enough nodes"),
        ("sge", "state qw"),
        ("lsf", "New job is waiting for scheduling"),
        ("htcondor", "0 of 2 hosts run"),
    ],
)
def test_the_reason_of_the_wait_is_shown(
    hosts: HostNetwork, console: Console, system: str, said: str
):
    hosts["laptop"].run("touch", f"{FOLDER}/hold")
    console.begin(f"cluster = started({system!r}, {SYSTEMS[system]})")
    wait_until(lambda: "script.41" in listed(hosts), HANG_S, str)
    hosts["laptop"].run("rm", f"{FOLDER}/hold")
    console.result()
    # The job may have been asked for the first time after that.
    if console.value("len(seen)"):
        assert said in console.value("seen[0]")
    console.do("cluster.stop()")


def listed(hosts: HostNetwork) -> str:
    return hosts["laptop"].run("ls", FOLDER).stdout


@pytest.mark.parametrize(
    "system",
    [
        "pbs",
        pytest.param("sge", marks=pytest.mark.slow),
        pytest.param("lsf", marks=pytest.mark.slow),
        pytest.param("htcondor", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_ends_takes_its_ranks(
    hosts: HostNetwork, console: Console, system: str
):
    console.do(f"cluster = started({system!r}, {SYSTEMS[system]}, on_failure='stop')")
    console.begin(
        "try: cluster.execute('import time; time.sleep(100)')\n"
        "except nbdist.errors.NbdistError as error: raised = str(error)"
    )
    delete = {"lsf": "bkill", "htcondor": "condor_rm"}.get(system, "qdel")
    variables = f"PATH={FOLDER}:$PATH BATCH_FOLDER={FOLDER}"
    hosts["laptop"].run("sh", "-c", f"{variables} {delete} 41")
    console.result()
    assert "rank 0" in console.value("raised")
    # Where the system ends the ranks itself, its state is seen after their end.
    wait_until(lambda: "ends job 41" in console.value("' '.join(notes)"), HANG_S, str)
    console.do("cluster.stop()")
    wait_until(lambda: is_unused(hosts), HANG_S, str)


@pytest.mark.parametrize(
    ("kind", "command", "variables"),
    [
        (PbsJob, "qsub", {"PBS_JOBID": "7.laptop", "PBS_NODEFILE": "b\nb\nc\nc\n"}),
        (SgeJob, "qsub", {"JOB_ID": "7", "PE_HOSTFILE": "b 2 q@b -\nc 2 q@c -\n"}),
        (LsfJob, "bsub", {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "b 2 c 2"}),
    ],
)
def test_inside_a_job_its_variables_name_the_hosts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BatchJob],
    command: str,
    variables: dict[str, str],
):
    program = tmp_path / command
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in variables.items():
        if name.endswith("FILE"):
            (tmp_path / "hosts").write_text(value)
            value = str(tmp_path / "hosts")
        monkeypatch.setenv(name, value)
    job = kind(ClusterConfig(n=3))
    assert job.id == kind.current() != ""
    assert job.cores() == {"b": 2, "c": 2}
    job.cancel()  # which leaves a job that it did not submit
    assert job.id == kind.current()


@pytest.mark.parametrize(
    ("system", "reason"),
    [("pbs", "Unknown queue"), ("sge", "Unknown queue"), ("lsf", "No such queue")],
)
def test_a_refused_job_says_why(console: Console, system: str, reason: str):
    extra = ", job_args='-pe mpi 2'" if system == "sge" else ""
    code = f"started({system!r}, n=2, partition='absent'{extra})"
    assert reason in console.error(code)


def test_a_job_of_grid_engine_needs_a_parallel_environment(console: Console):
    assert "--job-arg '-pe NAME 4'" in console.error("started('sge', n=4)")
