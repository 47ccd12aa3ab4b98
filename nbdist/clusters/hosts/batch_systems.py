"""The batch systems that `--launcher` names."""

from __future__ import annotations

from nbdist.clusters.hosts.batch_job import BatchJob
from nbdist.clusters.hosts.htcondor import HtcondorJob
from nbdist.clusters.hosts.lsf import LsfJob
from nbdist.clusters.hosts.pbs import PbsJob
from nbdist.clusters.hosts.sge import SgeJob
from nbdist.clusters.hosts.slurm import SlurmJob

__all__ = ["JOBS"]

JOBS: dict[str, type[BatchJob]] = {
    "slurm": SlurmJob,
    "pbs": PbsJob,
    "sge": SgeJob,
    "lsf": LsfJob,
    "htcondor": HtcondorJob,
}
