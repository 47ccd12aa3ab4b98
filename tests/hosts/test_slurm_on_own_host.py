"""A job of a real Slurm that has the notebook's own host among its nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.console import Console
from tests.hosts.network import HostNetwork
from tests.hosts.slurm_network import Slurm, why_no_slurm
from tests.hosts.test_slurm import START, SUM
from tests.processes import HANG_S, wait_until

ARE_ALIKE = True


@pytest.fixture
def slurm(hosts: HostNetwork) -> Iterator[Slurm]:
    if reason := why_no_slurm():
        pytest.skip(reason)
    slurm = Slurm(hosts, "a", ["a", "b"])
    yield slurm
    slurm.close()


@pytest.fixture
def console(slurm: Slurm) -> Iterator[Console]:
    with slurm.console() as console:
        console.do(START)
        yield console
    slurm.empty()


def test_all_ranks_are_processes_of_the_job(
    slurm: Slurm, console: Console, hosts: HostNetwork
):
    console.do("cluster = started(n=4, nnodes='2')")
    assert console.value("[i.host for i in cluster.infos]") == ["a", "a", "b", "b"]
    assert console.value(f"printed({SUM!r})") == ["10"] * 4
    jobs = console.value("printed('import os; print(os.environ[\"SLURM_JOB_ID\"])')")
    assert jobs == [slurm.run("squeue", "-h", "-o", "%i")] * 4
    ranks = console.value("[(i.host, str(i.pid)) for i in cluster.infos]")
    console.begin("cluster.execute('import time; time.sleep(3600)')")
    slurm.run("scancel", jobs[0])
    _, _, error = console._answer()
    assert f"Slurm ends job {jobs[0]}" in error
    for name, pid in ranks:
        look = ("ps", "-p", pid, "-o", "args=")
        wait_until(
            lambda host=hosts[name], look=look: (
                "nbdist rank" not in host.run(*look, check=False).stdout
            ),
            HANG_S,
            str,
        )
