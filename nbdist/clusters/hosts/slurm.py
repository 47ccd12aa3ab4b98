"""An allocation of Slurm for the ranks of a cluster.

The job is submitted by ipyparallel's launcher. Its script waits, and each host of the
allocation is reached by `srun`, as other hosts are by ssh: its agent is a step of the
job. Inside an allocation, such as that of salloc, no job is submitted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nbdist.clusters.hosts.host_list import HostSlots, nodes_of
from nbdist.clusters.hosts.remote_shell import Problem, RemoteShell
from nbdist.config import ClusterConfig
from nbdist.errors import StartError, UsageError

__all__ = ["SlurmJob", "Srun", "current_job"]

COMMAND_TIMEOUT_S = 20.0
POLL_S = 1.0
"""Seconds between two looks at the queue."""
WATCH_S = 5.0
"""Seconds between two looks at a job that runs."""
NOTICE_S = 120
"""Seconds before its end at which a job's end is told."""
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
OF_A_TASK = ("NTASKS", "NPROCS", "PROCID", "LOCALID", "NODEID", "TASK_PID")
"""Variables of `srun` from which libraries would derive another rank and size."""


def current_job() -> str | None:
    """The job in whose allocation this process runs; None outside of one."""
    return os.environ.get("SLURM_JOB_ID")


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

    def problem(self, host: str, code: int | None, log: str, python: str) -> Problem:
        see = (
            f"look what `srun --jobid={self._job} -w {host} {python} --version` prints"
        )
        if code is None:
            return Problem("does not answer", see)
        if "No module named" in log and "nbdist" in log:
            remedy = f"install nbdist for {python} there, or name another with --python"
            return Problem("its Python has no nbdist", remedy)
        if code == 127 or "No such file" in log:
            return Problem(f"has no {python}", "name one that it has with --python")
        last = log.strip().splitlines()[-1:] or [f"exit code {code}"]
        return Problem(last[0], see)


class SlurmJob:
    """The allocation that a cluster's ranks run in.

    Args:
        config: The options of the cluster; `n` is the number of ranks.

    Raises:
        UsageError: There is no Slurm here.
    """

    def __init__(self, config: ClusterConfig) -> None:
        if shutil.which("sbatch") is None:
            raise UsageError(
                "--launcher slurm: there is no sbatch here; start the notebook on a "
                "host that submits jobs, or name hosts with -H"
            )
        self._config = config
        self._is_own = current_job() is None
        self._id = current_job() or ""
        self._watcher: _Watcher | None = None

    @property
    def shell(self) -> Srun:
        """Reaches the hosts of the allocation."""
        return Srun(self._id)

    def allocate(self, on_wait: Callable[[str], None]) -> list[HostSlots]:
        """Submit the job, and wait until it runs. An interrupt cancels it.

        Args:
            on_wait: Called with the state of the job while it waits.

        Returns:
            The hosts, and the number of ranks on each.

        Raises:
            StartError: Slurm refuses the job, or the job ended before it ran.
        """
        if self._is_own:
            self._id = self._submit()
        try:
            while (state := _ask(self._id, "%T")) != "RUNNING":
                if state not in ("PENDING", "CONFIGURING"):
                    raise StartError(
                        f"Slurm's job {self._id} ended before it ran: "
                        f"{state or 'it is no longer in the queue'}"
                    )
                on_wait(self._place())
                time.sleep(POLL_S)  # Slurm has no event for it
            return self._slots()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the job, if it was submitted here. A second call does nothing."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        if self._is_own and self._id:
            number, self._id = self._id, ""
            with contextlib.suppress(StartError):  # it has ended
                _run("scancel", number)

    def watch(self, on_note: Callable[[str], None]) -> None:
        """Say when the job is about to end.

        Args:
            on_note: Called from a thread.
        """
        self._watcher = _Watcher(self._id, on_note)

    def _submit(self) -> str:
        # Slow to import, and not needed without Slurm.
        from ipyparallel.cluster.launcher import LauncherError, SlurmLauncher

        class Launcher(SlurmLauncher):  # type: ignore[misc]
            def _run_command(self, command: list[str], **options: Any) -> Any:
                # The reason of a refusal.
                return super()._run_command(command, stderr=subprocess.PIPE, **options)

        config = self._config
        least, most = nodes_of(config.nnodes)
        nodes = {"--nodes": f"{least}-{most}" if least != most else least}
        # The launcher takes --nodes for -n, and would leave out --ntasks.
        options = {"--ntasks": config.n, "--gres": config.gres, **nodes}
        lines = [f"#SBATCH {name}={value}" for name, value in options.items() if value]
        lines += [f"#SBATCH {arg}" for arg in shlex.split(config.sbatch_args or "")]
        first, rest = SCRIPT.split("\n", 1)
        script = "\n".join([first, *lines, rest])
        with tempfile.TemporaryDirectory(prefix="nbdist-slurm-") as folder:
            launcher = Launcher(
                work_dir=folder,
                profile_dir=folder,
                output_file="/dev/null",
                log=logging.getLogger("nbdist"),
                queue=config.partition or "",
                account=config.account or "",
                timelimit=config.time or "",
            )
            launcher.default_template = script
            try:
                with _errors_of("sbatch"):
                    return str(launcher.start(config.n))
            except LauncherError as error:
                raise StartError(f"sbatch: {error}") from error

    def _place(self) -> str:
        """The job's place in the queue, and why it waits."""
        partition, reason, start = _ask(self._id, "%P|%r|%S").split("|")
        queue = _run(
            *("squeue", "--noheader", "--states=PENDING", "--sort=-p,i"),
            *(f"--partition={partition}", "--format=%i"),
        ).split()
        place = f"{queue.index(self._id) + 1} of {len(queue)}"
        place = f"position {place}" if self._id in queue else "at the front"
        when = "" if start in ("", "N/A") else f", expected to start at {start}"
        return (
            f"job {self._id} waits in the queue: {place} in partition {partition} "
            f"({reason}{when})"
        )

    def _slots(self) -> list[HostSlots]:
        """The hosts of the allocation, and the number of ranks on each."""
        text = _run("scontrol", "show", "--details", "--oneliner", "job", self._id)
        found = re.search(r"CPUs/Task=(\d+)", text)
        per_task = int(found[1]) if found else 1
        cores: dict[str, int] = {}
        for group in re.finditer(r" Nodes=(\S+) CPU_IDs=(\S+)", text):
            count = sum(map(_length, group[2].split(",")))
            for name in _run("scontrol", "show", "hostnames", group[1]).split():
                cores[name] = cores.get(name, 0) + max(1, count // per_task)
        n = self._config.n or len(cores)
        # A whole node may have more cores than its share of the ranks.
        share = -(-n // len(cores))
        slots = {name: min(count, share) for name, count in cores.items()}
        for name, count in cores.items():
            slots[name] += max(0, min(n - sum(slots.values()), count - slots[name]))
        return [HostSlots(name, count) for name, count in slots.items()]


class _Watcher:
    """Looks at a job that runs, on a thread."""

    def __init__(self, job: str, on_note: Callable[[str], None]) -> None:
        self._job, self._on_note = job, on_note
        self._ended = threading.Event()
        thread = threading.Thread(target=self._run, name="nbdist-slurm", daemon=True)
        thread.start()

    def close(self) -> None:
        """Look no more. A second close does nothing."""
        self._ended.set()

    def _run(self) -> None:
        told = False
        while not self._ended.wait(WATCH_S):
            try:
                state, left = _ask(self._job, "%T|%L").split("|")
            except (StartError, ValueError):  # slurmctld restarts, or the job is gone
                continue
            seconds = _seconds(left)
            if state != "RUNNING" and not self._ended.is_set():
                self._on_note(f"Slurm ends job {self._job}: {state}")
                return
            if not told and seconds is not None and seconds <= NOTICE_S:
                told = True
                self._on_note(
                    f"Slurm ends job {self._job} in {seconds} s, at its time limit: "
                    "pull or save what you need"
                )


def _ask(job: str, fields: str) -> str:
    """Fields of a job, as squeue formats them; "" if it is no longer listed."""
    listed = _run("squeue", "--noheader", f"--jobs={job}", f"--format={fields}")
    return listed.strip()


def _run(*argv: str) -> str:
    """The output of one of Slurm's commands.

    Raises:
        StartError: It fails.
    """
    with _errors_of(argv[0]):
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=True,
            timeout=COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        ).stdout


@contextlib.contextmanager
def _errors_of(command: str) -> Iterator[None]:
    """Raise a StartError, with what Slurm said, where a command fails."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        said = error.stderr or error.stdout or f"exit code {error.returncode}"
        said = said if isinstance(said, str) else said.decode(errors="replace")
        raise StartError(f"{command}: {said.strip()}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError(f"{command}: {error}") from error


def _length(span: str) -> int:
    """The number of cores of such as "3" or "0-7"."""
    first, _, last = span.partition("-")
    return int(last or first) - int(first) + 1


def _seconds(left: str) -> int | None:
    """Seconds of Slurm's times, such as "1-02:03:04" or "4:30"; None if not known."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", left)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(each or 0) for each in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
