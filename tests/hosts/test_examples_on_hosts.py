"""The example notebooks that need several hosts, or Slurm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.network import ROOT, HostNetwork, TestHost
from tests.hosts.slurm_network import FOLDER, Slurm, why_no_slurm
from tests.processes import HANG_S, wait_until

ONE_USER = True
RUN = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "examples")!r})
import run
name = sys.argv[1] + ".ipynb"
run.execute(run.EXAMPLES / name, Path("/tmp/executed", name))
"""


def executed(host: TestHost, name: str, **variables: str) -> str:
    """What an example prints that is run on a host."""
    settings = [f"{key}={value}" for key, value in variables.items()]
    argv = ["env", *settings, host.python, "-c", RUN, name]
    try:
        return host.run(*argv, timeout_s=150.0).stdout
    finally:
        host.run("rm", "-rf", "/tmp/executed")


def test_the_notebook_on_two_hosts_runs(hosts: HostNetwork):
    printed = executed(hosts["laptop"], "two_hosts", NBDIST_HOSTS="a:2,b:2")
    for name in ("a", "b"):
        assert printed.count(f"on {name}: the sum of all ranks is 6") == 2
    assert "accuracy 0.9" in printed
    for name in ("a", "b", "laptop"):
        wait_until(lambda name=name: hosts[name].processes() == [], HANG_S, str)


@pytest.fixture
def slurm(hosts: HostNetwork) -> Iterator[Slurm]:
    if reason := why_no_slurm():
        pytest.skip(reason)
    slurm = Slurm(hosts, "laptop", ["b", "c"])
    yield slurm
    slurm.close()


def test_the_notebook_on_slurm_runs(slurm: Slurm, hosts: HostNetwork):
    config = f"{FOLDER}/slurm.conf"
    printed = executed(hosts["laptop"], "slurm", SLURM_CONF=config)
    for name in ("b", "c"):
        assert f"on {name}: the sum of all ranks is 6" in printed
    assert "accuracy 0.9" in printed
    assert printed.rstrip().endswith("0")  # no job runs
    slurm.empty()
