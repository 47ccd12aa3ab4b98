"""`--launcher`, and the options that belong to one launcher."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist import Cluster
from nbdist.errors import UsageError
from nbdist.magics import DistMagics


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that can submit jobs, outside of one. Nothing is submitted."""
    for name in ("sbatch", "qsub", "bsub"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "PBS_NODEFILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launcher": "k8s"}, "'k8s' is not known: expected local, ssh, slurm, pbs, "),
        ({"launcher": "ssh"}, "--launcher ssh: name the hosts with -H"),
        ({"launcher": "local", "hosts": "a:2"}, "local has its own hosts: leave out"),
        ({"launcher": "slurm", "hosts": "a:2"}, "slurm has its own hosts: leave out"),
        ({"partition": "gpu"}, "gpu: only for --launcher slurm, pbs, sge, lsf"),
        ({"hosts": "localhost:2", "time": "1:00"}, "--time 1:00: only for"),
        ({"job_args": "--qos=high"}, "--job-arg --qos=high: only for"),
        ({"launcher": "sge", "gres": "gpu:1"}, "not for --launcher sge; give an"),
        ({"launcher": "htcondor", "time": "1:00"}, "not for --launcher htcondor"),
        ({"launcher": "pbs", "nnodes": "1:2"}, "pbs takes one number of hosts"),
    ],
)
def test_options_of_another_launcher_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Cluster(**options)


def test_without_sbatch_there_is_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no sbatch here; start the notebook"):
        Cluster(launcher="slurm")


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"nnodes": "2"}, 2),
        ({"nnodes": "2:4", "gres": "gpu:4"}, 8),
        ({"gres": "gpu"}, 1),
        ({"gres": "gpu:a100:2"}, 2),
        ({"gres": "craynetwork:3,gpu:h100:4"}, 4),
        ({"gres": "craynetwork:3"}, 1),
    ],
)
@pytest.mark.usefixtures("sbatch")
def test_a_job_has_a_rank_for_each_gpu_or_host(
    options: dict[str, Any], ranks: int
) -> None:
    assert Cluster(launcher="slurm", **options).size == ranks


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("slurm", {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6"}),
        ("pbs", {"PBS_JOBID": "7", "PBS_NODEFILE": "nodes"}),
        ("sge", {"JOB_ID": "7", "PE_HOSTFILE": "hosts", "NSLOTS": "6"}),
        ("lsf", {"LSB_JOBID": "7", "LSB_DJOB_NUMPROC": "6"}),
    ],
)
def test_a_job_that_exists_tells_the_number_of_ranks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    variables: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes").write_text("b\nb\nb\nc\nc\nc\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Cluster(launcher=launcher).size == 6


@pytest.mark.usefixtures("sbatch")
def test_a_node_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PBS_JOBID", "7")
    monkeypatch.setenv("PBS_NODEFILE", "/nowhere/nodes")
    with pytest.raises(UsageError, match=r"PBS_NODEFILE=/nowhere/nodes: .*give -n"):
        Cluster(launcher="pbs")


def test_an_option_of_the_job_may_have_spaces():
    started: list[dict[str, object]] = []
    session = SimpleNamespace(start=lambda *_, **options: started.append(options))
    magics = SimpleNamespace(session=session, dist_start=DistMagics.dist_start)
    line = "--launcher sge --job-arg '-pe mpi 8' --job-arg=-notify"
    DistMagics.dist_start(magics, line)
    assert started[0]["job_args"] == "-pe mpi 8 -notify"
