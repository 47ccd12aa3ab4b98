"""A job of PBS (OpenPBS, PBS Professional) for the ranks of a cluster."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

from nbdist.clusters.hosts.batch_job import (
    WAITING,
    BatchJob,
    JobState,
    output_of,
    seconds_of,
)
from nbdist.clusters.hosts.host_list import gpus_of, nodes_of

__all__ = ["PbsJob"]

ENDED = {35: "finished", 153: "unknown"}
"""qstat's exit codes for a job that has ended: "Job has finished", "Unknown Job Id"."""


class PbsJob(BatchJob):
    """A job of PBS."""

    system = "PBS"
    command = "qsub"

    @staticmethod
    def current() -> str | None:
        return os.environ.get("PBS_JOBID")

    def submit(self) -> str:
        # Slow to import, and not needed without PBS.
        from ipyparallel.cluster.launcher import PBSLauncher

        config = self._config
        n, hosts = config.n or 1, nodes_of(config.nnodes)[0]
        gpus = gpus_of(config.gres)
        each = -(-n // hosts) if hosts else 1
        chunk = f"{hosts or n}:ncpus={each}:mpiprocs={each}"
        if gpus:
            chunk += f":ngpus={gpus if hosts or n == 1 else 1}"
        lines = ["#!/bin/sh", "#PBS -N nbdist", f"#PBS -l select={chunk}"]
        if hosts:
            lines.append("#PBS -l place=scatter")
        if config.time:
            lines.append(f"#PBS -l walltime={config.time}")
        if config.account:
            lines.append(f"#PBS -A {config.account}")
        if config.job_args:
            lines.append(f"#PBS {config.job_args}")
        return self.submit_script(PBSLauncher, "\n".join([*lines, WAITING, ""]))

    def look(self) -> JobState:
        told = self._told()
        text = told.get("job_state", "")
        if text in ("Q", "H", "W", "T"):
            return JobState("waits", told.get("comment", f"state {text}"))
        if text in ("R", "S", "U"):
            limit = seconds_of(told.get("Resource_List.walltime", ""))
            used = seconds_of(told.get("resources_used.walltime", "0"))
            left = None if limit is None else max(0, limit - (used or 0))
            return JobState("runs", text, left)
        return JobState("ended", told.get("comment", text))

    def delete(self) -> None:
        output_of("qdel", self.id)

    def cores(self) -> dict[str, int]:
        if (listed := os.environ.get("PBS_NODEFILE")) and not self._is_own:
            return dict(Counter(Path(listed).read_text(encoding="utf-8").split()))
        cores: dict[str, int] = {}
        # Such as b/0*2+c/0*2.
        for part in self._told().get("exec_host", "").split("+"):
            name, _, rest = part.partition("/")
            count = rest.partition("*")[2]
            if name:
                cores[name] = cores.get(name, 0) + int(count or 1)
        return cores

    def _told(self) -> dict[str, str]:
        """What qstat says about the job; {} if it has ended."""
        text = output_of("qstat", "-f", self.id, codes=dict.fromkeys(ENDED, ""))
        text = re.sub(r"\n\t", "", text)  # long lines are wrapped
        return dict(re.findall(r"^ +(\S+) = (.*)$", text, re.MULTILINE))
