"""A job of a real Slurm that has the notebook's own host among its nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.console import Console
from tests.hosts.network import HostNetwork
from tests.hosts.slurm_network import Slurm, why_no_slurm
from tests.hosts.test_slurm import START, SUM
from tests.processes import HANG_S, wait_until

ONE_USER = True


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


OPTIONS = "--ntasks=4 --nodes=2"
WAYS = {
    "in a shell of salloc": f'exec salloc -Q {OPTIONS} "$@"',
    "in a step": f'exec salloc -Q {OPTIONS} srun -Q --overlap -u -n1 -N1 "$@"',
    "in an interactive step": (
        f'exec salloc -Q {OPTIONS} srun -Q --interactive --preserve-env -u -n1 -N1 "$@"'
    ),
    "in a job": (
        "cd /tmp; mkfifo in out; "
        f'sbatch -Q {OPTIONS} --output=none --wrap "$* < /tmp/in > /tmp/out"; '
        "cat out & cat > in; wait; rm in out"
    ),
}
"""How a notebook on a host comes to have an allocation with that host in it."""


@pytest.mark.parametrize("way", WAYS)
def test_the_allocation_of_the_notebook_is_used_as_it_is(
    slurm: Slurm, hosts: HostNetwork, way: str
):
    """As it is in a terminal of the node, and where JupyterHub starts notebooks."""
    wrapper = ("sh", "-c", WAYS[way], "sh")
    with slurm.console(*wrapper) as console:
        console.do(START)
        job = console.value("os.environ['SLURM_JOB_ID']")
        console.do("cluster = started()")
        assert console.value("[i.host for i in cluster.infos]") == ["a", "a", "b", "b"]
        assert console.value(f"printed({SUM!r})") == ["10"] * 4
        jobs = "import os; print(os.environ['SLURM_JOB_ID'])"
        assert console.value(f"printed({jobs!r})") == [job] * 4
        died = console.error("cluster.execute('if rank == 1: os.kill(os.getpid(), 9)')")
        assert "rank 1" in died
        assert console.value(f"printed({SUM!r})") == ["10"] * 4
        console.do("cluster.stop()")
        assert slurm.run("squeue", "-h", "-o", "%i %T") == f"{job} RUNNING"
    wait_until(lambda: slurm.run("squeue", "-h") == "", HANG_S, str)
    for name in ("a", "b"):
        assert not [each for each in hosts[name].processes() if "nbdist" in each]


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
