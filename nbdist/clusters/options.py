"""Checks of a cluster's options, before anything is started."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from nbdist.clusters.hosts.host_list import gpus_of, hosts_of, nodes_of
from nbdist.config import ClusterConfig, File, check_for_ranks
from nbdist.errors import UsageError
from nbdist.training.elastic import checkpoint
from nbdist.wire import Resume, format_ranks

__all__ = [
    "BATCH_OPTIONS",
    "check_timeout",
    "checked_script",
    "configured",
    "existing_ranks",
    "resume_of",
    "suggests_keywords",
]

BATCH_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "slurm": ("--partition", "--account", "--time", "--gres", "--nodes", "--job-arg"),
    "pbs": ("--partition", "--account", "--time", "--gres", "--nodes", "--job-arg"),
    "sge": ("--partition", "--account", "--time", "--job-arg"),
    "lsf": ("--partition", "--account", "--time", "--gres", "--nodes", "--job-arg"),
    "htcondor": ("--account", "--gres", "--nodes", "--job-arg"),
}
"""The options of a job that each batch system takes."""
RANKS_OF_JOB = {
    "slurm": "SLURM_NTASKS",
    "sge": "NSLOTS",
    "lsf": "LSB_DJOB_NUMPROC",
}
"""The variable with the number of ranks, inside a job."""

P = ParamSpec("P")
R = TypeVar("R")


def suggests_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise UsageError, with a suggestion, for an unknown keyword.

    The signature is preserved for type checkers and for `inspect`.
    """
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameters:
                raise UsageError(_unknown_option(name, known))
        return function(*args, **kwargs)

    return checked


def _unknown_option(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown option {name!r}: {hint}The options are {', '.join(known)}"


def configured(options: Mapping[str, Any], file: File) -> ClusterConfig:
    """The configuration of a cluster.

    Args:
        options: Fields of `ClusterConfig`. None takes the value from the environment,
            the file, or the default.
        file: The settings in nbdist.toml.

    Raises:
        UsageError: The value of an option is invalid, or a setting of the ranks.
    """
    check_for_ranks(file)
    given = {name: value for name, value in options.items() if value is not None}
    config = replace(ClusterConfig.read(file), **given)
    if not 0 < config.timeout_s < threading.TIMEOUT_MAX:
        raise UsageError(f"--timeout {config.timeout_s}: expected seconds above 0")
    if config.on_failure not in ("stop", "shrink", "replace"):
        raise UsageError(
            f"--on-failure {config.on_failure!r} is not known: expected stop, shrink "
            "or replace"
        )
    if not 2 <= config.host_timeout_s < threading.TIMEOUT_MAX:
        raise UsageError(
            f"NBDIST_HOST_TIMEOUT={config.host_timeout_s}: expected 2 seconds or more"
        )
    known = ("local", "ssh", *BATCH_OPTIONS)
    if config.launcher not in ("auto", *known):
        raise UsageError(
            f"--launcher {config.launcher!r} is not known: expected "
            f"{', '.join(known[:-1])} or {known[-1]}"
        )
    hosts = hosts_of(config)
    _check_launcher(config, bool(hosts))
    if config.launcher in BATCH_OPTIONS:
        return _in_job(config)
    least, most = nodes_of(config.nnodes)
    if least is not None and least > len(hosts):
        raise UsageError(f"--nnodes {config.nnodes} of {len(hosts)} hosts in the list")
    slots = sum(sorted(each.slots for each in hosts)[-(most or len(hosts)) :])
    return config if not hosts else _on_hosts(config, slots)


def _check_launcher(config: ClusterConfig, has_hosts: bool) -> None:
    """Check that options of one launcher are not given to another."""
    name = config.launcher
    if has_hosts and name in ("local", *BATCH_OPTIONS):
        raise UsageError(f"--launcher {name} has its own hosts: leave out -H")
    if name == "ssh" and not has_hosts:
        raise UsageError("--launcher ssh: name the hosts with -H server1:4,server2:4")
    of_jobs = {
        "--partition": config.partition,
        "--account": config.account,
        "--time": config.time,
        "--gres": config.gres,
        "--job-arg": config.job_args,
    }
    if name in BATCH_OPTIONS:
        of_jobs["--nodes"] = config.nnodes
    takes = BATCH_OPTIONS.get(name, ())
    for option, value in of_jobs.items():
        if not value or option in takes:
            continue
        if name in BATCH_OPTIONS:
            raise UsageError(
                f"{option} {value}: not for --launcher {name}; give an option of its "
                "own with --job-arg"
            )
        able = [each for each, options in BATCH_OPTIONS.items() if option in options]
        raise UsageError(f"{option} {value}: only for --launcher {', '.join(able)}")
    least, most = nodes_of(config.nnodes)
    if name in BATCH_OPTIONS and name != "slurm" and least != most:
        raise UsageError(
            f"--nodes {config.nnodes}: --launcher {name} takes one number of hosts"
        )


def _in_job(config: ClusterConfig) -> ClusterConfig:
    """Derive the number of ranks in a job of a batch system, if it is not given."""
    if config.n is not None:
        return config
    allocated = _allocated(config.launcher)
    if allocated is not None:
        return replace(config, n=allocated)
    of_host = gpus_of(config.gres) or 1
    return replace(config, n=(nodes_of(config.nnodes)[0] or 1) * of_host)


def _allocated(launcher: str) -> int | None:
    """The number of ranks of the job that this process runs in; None outside a job.

    Raises:
        UsageError: The file that PBS names cannot be read.
        StartError: Slurm does not tell the number.
    """
    if launcher == "pbs":
        listed = os.environ.get("PBS_NODEFILE")
        try:
            # A line for each MPI process.
            return None if not listed else len(Path(listed).read_text().split())
        except OSError as error:
            raise UsageError(f"PBS_NODEFILE={listed}: {error}; give -n") from error
    if launcher == "slurm" and "SLURM_STEP_ID" in os.environ:
        # SLURM_NTASKS is then that of the step, such as the one of a JupyterLab.
        from nbdist.clusters.hosts.slurm import tasks_of

        return tasks_of(os.environ["SLURM_JOB_ID"])
    number = os.environ.get(RANKS_OF_JOB.get(launcher, ""))
    return None if number is None else int(number)


def _on_hosts(config: ClusterConfig, slots: int) -> ClusterConfig:
    """Derive the number of ranks from the slots of all hosts, and check it."""
    if config.host_discovery is not None:
        return replace(config, n=min(slots, config.n or slots))
    if config.n is not None and config.n > slots:
        where = (
            f"-H {config.hosts}" if config.hosts else f"--hostfile {config.hostfile}"
        )
        raise UsageError(f"-n {config.n} ranks on the {slots} slots of {where}")
    return replace(config, n=slots if config.n is None else config.n)


def resume_of(config: ClusterConfig) -> Resume | None:
    """The file to resume from, after checking that it is complete.

    Raises:
        CheckpointError: Neither it nor the previous file is complete.
    """
    if config.resume is None:
        return None
    checkpoint.check(Path(config.resume))
    return Resume(str(Path(config.resume).resolve()))


def checked_script(
    path: str | os.PathLike[str], n_ps: int, size: int, is_module: bool = False
) -> Path:
    """The absolute path of a script for `size` ranks with `n_ps` parameter servers.

    The name of a module is returned as it is, because the ranks look for it.

    Raises:
        UsageError: The file does not exist, or no worker is left.
    """
    if isinstance(n_ps, bool) or not isinstance(n_ps, int) or not 0 <= n_ps < size:
        raise UsageError(
            f"--n-ps {n_ps!r}: expected 0 to {size - 1} parameter servers of {size} "
            "ranks, because at least one rank must be a worker"
        )
    if is_module:
        return Path(path)
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise UsageError(
            f"no script {os.fspath(path)!r}: {file} {what}; pass a path "
            "relative to the notebook's folder, or an absolute path"
        )
    return file


def check_timeout(timeout_s: float | None) -> None:
    """Check the time limit of a call; None for no limit.

    Raises:
        UsageError: It is not above 0.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise UsageError(f"--timeout {timeout_s:g}: expected seconds above 0")


def existing_ranks(ranks: Iterable[int], size: int) -> list[int]:
    """Check that ranks exist in a world of `size`, and return them in rank order.

    Raises:
        UsageError: A rank does not exist, or there is none.
    """
    wanted = sorted(set(ranks))
    missing = [rank for rank in wanted if rank not in range(size)]
    if missing or not wanted:
        raise UsageError(
            f"rank {format_ranks(missing) or '(none)'} is not one of 0-{size - 1}"
        )
    return wanted
