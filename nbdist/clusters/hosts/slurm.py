"""An allocation of Slurm for the ranks of a cluster.

Each host of the allocation is reached by `srun`, as other hosts are by ssh: its agent
is a step of the job. Inside an allocation, such as that of salloc, no job is submitted.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Sequence
from datetime import datetime

from nbdist.clusters.hosts.batch_job import BatchJob, JobState, output_of, seconds_of
from nbdist.clusters.hosts.host_list import nodes_of
from nbdist.clusters.hosts.remote_python import RemotePython
from nbdist.clusters.hosts.remote_shell import Problem, RemoteShell, problem_in_job

__all__ = ["SlurmJob", "Srun", "tasks_of"]

SCRIPT = """#!/bin/sh
#SBATCH --job-name=nbdist
#SBATCH --chdir=/
idle=0
while [ $idle -lt 4 ]; do
  sleep 30
  steps=$(squeue --noheader --steps --jobs=$SLURM_JOB_ID --format=%i) || continue
  idle=$((idle + 1))
  if echo "$steps" | grep -q '[.][0-9]'; then idle=0; fi
done
"""
"""What the job runs. It ends when no host has been in use for two minutes, as when the
notebook's host has lost power."""
RUNS = ("RUNNING", "SIGNALING", "STOPPED", "SUSPENDED", "RESIZING")
NO_LIMIT_S = 300 * 86400
"""Slurm has a job without a limit end in a year."""
OF_A_TASK = ("NTASKS", "NPROCS", "PROCID", "LOCALID", "NODEID", "TASK_PID")
"""Variables of `srun` from which libraries would derive another rank and size."""


class Srun(RemoteShell):
    """Slurm's `srun`, on the hosts of an allocation.

    Args:
        job: The job's number.
    """

    def __init__(self, job: str) -> None:
        self._job = job

    def argv(self, host: str, command: Sequence[str]) -> list[str]:
        own = ["-n1", "-N1", "--overlap", "--unbuffered", "--mpi=none", "--chdir=/"]
        unset = [f"--unset=SLURM_{name}" for name in OF_A_TASK]
        where = [f"--jobid={self._job}", f"--nodelist={host}", "--cpu-bind=none"]
        return ["srun", *where, *own, "env", *unset, *command]

    def problem(
        self, host: str, code: int | None, log: str, python: RemotePython
    ) -> Problem:
        command = f"srun --jobid={self._job} -w {host}"
        return problem_in_job(command, code, log, python)


class SlurmJob(BatchJob):
    """A job of Slurm."""

    system = "Slurm"
    command = "sbatch"
    holds_processes = True

    @staticmethod
    def current() -> str | None:
        return os.environ.get("SLURM_JOB_ID")

    @property
    def shell(self) -> RemoteShell:
        return Srun(self.id)

    def submit(self) -> str:
        # Slow to import, and not needed without Slurm.
        from ipyparallel.cluster.launcher import SlurmLauncher

        config = self._config
        least, most = nodes_of(config.nnodes)
        nodes = {"--nodes": f"{least}-{most}" if least != most else least}
        # The launcher takes --nodes for -n, and would leave out --ntasks.
        options = {"--ntasks": config.n, "--gres": config.gres, **nodes}
        lines = [f"#SBATCH {name}={value}" for name, value in options.items() if value]
        lines += [f"#SBATCH {arg}" for arg in shlex.split(config.job_args or "")]
        first, rest = SCRIPT.split("\n", 1)
        script = "\n".join([first, *lines, rest])
        account, time = config.account or "", config.time or ""
        return self.submit_script(
            SlurmLauncher, script, account=account, timelimit=time
        )

    def look(self) -> JobState:
        text, _, times = self._ask("%T|%L|%e").partition("|")
        if text in ("PENDING", "CONFIGURING"):
            return JobState("waits", text)
        if text in RUNS:
            left, _, end = times.partition("|")
            seconds = _seconds_left(left, end)
            if seconds is None:
                seconds = self._grace_left()
            return JobState("runs", text, seconds)
        return JobState("ends" if text == "COMPLETING" else "ended", text)

    def place(self, state: JobState) -> str:
        """The job's place in the queue, and why it waits."""
        partition, reason, start = self._ask("%P|%r|%S").split("|")
        queue = output_of(
            *("squeue", "--noheader", "--states=PENDING", "--sort=-p,i"),
            *(f"--partition={partition}", "--format=%i"),
        ).split()
        place = "at the front"
        if self.id in queue:
            place = f"position {queue.index(self.id) + 1} of {len(queue)}"
        when = "" if start in ("", "N/A") else f", expected to start at {start}"
        return (
            f"job {self.id} waits in the queue: {place} in partition {partition} "
            f"({reason}{when})"
        )

    def delete(self) -> None:
        output_of("scancel", self.id)

    def cores(self) -> dict[str, int]:
        text = output_of("scontrol", "show", "--details", "--oneliner", "job", self.id)
        found = re.search(r"CPUs/Task=(\d+)", text)
        per_task = int(found[1]) if found else 1
        cores: dict[str, int] = {}
        for group in re.finditer(r" Nodes=(\S+) CPU_IDs=(\S+)", text):
            count = sum(map(_length, group[2].split(",")))
            for name in output_of("scontrol", "show", "hostnames", group[1]).split():
                cores[name] = cores.get(name, 0) + max(1, count // per_task)
        return cores

    def _grace_left(self) -> int | None:
        """The seconds that a pre-empted job has left; None if it is not pre-empted.

        squeue does not tell them of a job without a time limit.
        """
        job = output_of("scontrol", "show", "--oneliner", "job", self.id)
        since = re.search(r" PreemptTime=(\d\S+)", job)
        partition = re.search(r" Partition=(\S+)", job)
        if since is None or partition is None:
            return None
        name = partition[1]
        told = output_of("scontrol", "show", "--oneliner", "partition", name)
        grace = re.search(r" GraceTime=([1-9]\d*)", told)
        if grace is None:  # such as that of a quality of service
            return None
        waited = datetime.now() - datetime.fromisoformat(since[1])
        return max(0, round(int(grace[1]) - waited.total_seconds()))

    def _ask(self, fields: str) -> str:
        """Fields of the job, as squeue formats them; "" if Slurm has forgotten it."""
        job = f"--jobs={self.id}"
        return output_of(
            "squeue", "--noheader", "--states=all", job, f"--format={fields}"
        ).strip()


def tasks_of(job: str) -> int:
    """The number of tasks of a job, of which each of its steps may run fewer."""
    ask = (f"--jobs={job}", "--Format=NumTasks")
    return int(output_of("squeue", "--noheader", *ask))


def _seconds_left(left: str, end: str) -> int | None:
    """The seconds until a job's end, which may come before its time limit.

    Args:
        left: The time until its limit.
        end: When it ends, which is changed when the job is pre-empted.
    """
    found = [] if (seconds := seconds_of(left)) is None else [seconds]
    with contextlib.suppress(ValueError):  # it has no end
        until = datetime.fromisoformat(end) - datetime.now()
        found.append(max(0, round(until.total_seconds())))
    return min((each for each in found if each < NO_LIMIT_S), default=None)


def _length(span: str) -> int:
    """The number of cores of such as "3" or "0-7"."""
    first, _, last = span.partition("-")
    return int(last or first) - int(first) + 1
