"""Jobs of HTCondor for the ranks of a cluster.

Each host is a job of its own, of one submission, and is reached by condor_ssh_to_job.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from nbdist.clusters.hosts.batch_job import WAITING, BatchJob, JobState, output_of
from nbdist.clusters.hosts.host_list import gpus_of, nodes_of
from nbdist.clusters.hosts.remote_python import RemotePython
from nbdist.clusters.hosts.remote_shell import Problem, RemoteShell, problem_in_job

__all__ = ["CondorSsh", "HtcondorJob"]

HELD, RUNNING = "5", "2"
PHASES = {"1": "waits", "2": "runs", "7": "runs"}
"""Of HTCondor's JobStatus: idle, running and suspended. The others are ended jobs."""


class CondorSsh(RemoteShell):
    """HTCondor's condor_ssh_to_job.

    Args:
        jobs: The number of the job on each host.
    """

    def __init__(self, jobs: dict[str, str]) -> None:
        self._jobs = jobs

    def argv(self, host: str, command: Sequence[str]) -> list[str]:
        return ["condor_ssh_to_job", self._jobs[host], shlex.join(command)]

    def problem(
        self, host: str, code: int | None, log: str, python: RemotePython
    ) -> Problem:
        command = f"condor_ssh_to_job {self._jobs[host]}"
        return problem_in_job(command, code, log, python)


class HtcondorJob(BatchJob):
    """Jobs of HTCondor, one for each host."""

    system = "HTCondor"
    command = "condor_submit"
    holds_processes = True

    @staticmethod
    def current() -> str | None:
        return None  # a job cannot reach the others of its submission

    @property
    def shell(self) -> RemoteShell:
        jobs: dict[str, str] = {}
        for number, _, host in self._rows():
            jobs.setdefault(host.rpartition("@")[2], f"{self.id}.{number}")
        return CondorSsh(jobs)

    def submit(self) -> str:
        # Slow to import, and not needed without HTCondor.
        from ipyparallel.cluster.launcher import HTCondorLauncher

        config = self._config
        n, hosts = config.n or 1, nodes_of(config.nnodes)[0] or 1

        line = WAITING.replace("\n", "; ").replace("do;", "do")
        # In a submit file "$(" begins a macro, and quotes are doubled.
        line = line.replace("$(", "$(DOLLAR)(").replace('"', '""').replace("'", "''")
        lines = [
            "universe = vanilla",
            "executable = /bin/sh",
            "transfer_executable = False",
            "batch_name = nbdist",
            f"arguments = \"-c '{line}'\"",
            f"request_cpus = {-(-n // hosts)}",
        ]
        if gpus := gpus_of(config.gres):
            lines.append(f"request_gpus = {gpus}")
        if config.account:
            lines.append(f"accounting_group = {config.account}")
        added = shlex.split(config.job_args or "")
        lines += [" = ".join(arg.split("=", 1)) for arg in added]
        script = "\n".join([*lines, f"queue {hosts}", ""])
        return self.submit_script(HTCondorLauncher, script)

    def look(self) -> JobState:
        states = [state for _, state, _ in self._rows()]
        if not states or len(states) < (nodes_of(self._config.nnodes)[0] or 1):
            return JobState("ended", "")
        phases = {PHASES.get(state, "ended") for state in states}
        if "ended" in phases:
            text = "held" if HELD in states else "removed or completed"
            see = f"`condor_q -hold {self.id}` has the reason"
            return JobState("ended", f"{text}: {see}")
        if "waits" in phases:
            running = sum(state == RUNNING for state in states)
            return JobState("waits", f"{running} of {len(states)} hosts run")
        return JobState("runs", "running")

    def delete(self) -> None:
        output_of("condor_rm", self.id)

    def cores(self) -> dict[str, int]:
        each = -(-(self._config.n or 1) // (nodes_of(self._config.nnodes)[0] or 1))
        cores: dict[str, int] = {}
        for _, _, slot in self._rows():
            host = slot.rpartition("@")[2]
            cores[host] = cores.get(host, 0) + each
        return cores

    def _rows(self) -> list[list[str]]:
        """Of each host's job: its number, its state, and the name of its slot."""
        # One that does not run has no RemoteHost, which is printed as "undefined".
        fields = ("ProcId", "JobStatus", "RemoteHost")
        text = output_of("condor_q", self.id, "-af", *fields)
        return [line.split() for line in text.splitlines()]
