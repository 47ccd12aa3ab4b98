"""Finds the processes of a cluster by their kind.

Ranks are forked from a rank host or are children of their rank parents. Tests find them
by these functions and not by a command line.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from nbdist import Cluster
from nbdist.clusters import fork_server_client
from nbdist.errors import NotRunning
from nbdist.ipc.fork_messages import FORKED, RANK_HOST
from nbdist.ipc.private_files import memory_folder
from nbdist.wire import RankInfo
from tests.processes import runs

__all__ = [
    "HELPERS",
    "ClusterProcesses",
    "StartingRank",
    "census",
    "fork_server",
    "is_fork_server",
    "is_rank",
    "process_supervisors",
    "rank_parent",
]

HELPERS = {"controller": "controller", "mpiexec": "--with-ft"}
"""A word in the command line of each program that a process supervisor starts, or has
the rank host fork."""
HOST_NAME = "nbdist rank hos"
"""The name of a rank host, of which Linux keeps 15 characters."""


def process_supervisors() -> set[psutil.Process]:
    """The process supervisors that this process has started."""
    children = psutil.Process().children()
    return {p for p in children if "nbdist.clusters.process_supervisor" in _command(p)}


def fork_server() -> psutil.Process | None:
    """This process's fork server; None where there is none."""
    server = fork_server_client._server
    return None if server is None else psutil.Process(server.pid)


def is_fork_server(process: psutil.Process) -> bool:
    """Whether a process is the fork server of any process."""
    words = _command(process)[1:2]
    return [Path(word).name for word in words] == ["fork_server.py"]


def rank_parent(info: RankInfo) -> psutil.Process:
    """The parent process of a rank, which mpiexec has started.

    Raises:
        psutil.NoSuchProcess: It has ended.
    """
    return psutil.Process(info.parent_pid)


class ClusterProcesses:
    """A process supervisor and all processes of its cluster.

    Args:
        supervisor: its process.
    """

    def __init__(self, supervisor: psutil.Process) -> None:
        self.supervisor = supervisor
        folders = [Path(word) for word in supervisor.cmdline() if word.startswith("/")]
        self.run_dir = next(path for path in reversed(folders) if path.is_dir())

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterProcesses:
        """The processes of a running cluster. This process may have other clusters.

        Raises:
            NotRunning, psutil.NoSuchProcess: It has ended.
        """
        if cluster._started is None:
            raise NotRunning("the cluster has ended")
        return cls(psutil.Process(cluster._started.process_supervisor._process.pid))

    def helper(self, name: str) -> psutil.Process | None:
        """The helper process of this name; None if it does not run.

        Args:
            name: "process supervisor", "controller", "mpiexec" or "rank host". A
                cluster whose ranks are not forked has no rank host.
        """
        if name == "process supervisor":
            return self.supervisor
        if name == "rank host":
            return self.rank_host
        parents = filter(None, [self.supervisor, self.rank_host])
        below = [process for parent in parents for process in parent.children()]
        found = [process for process in below if HELPERS[name] in _command(process)]
        return found[0] if found else None

    @property
    def rank_host(self) -> psutil.Process | None:
        """The process that has forked the ranks; None if there is none."""
        log = str(self.run_dir / f"{RANK_HOST}.log")
        # A child of the fork server, or of the process that adopts orphans.
        for process in psutil.process_iter(["name"]):
            if process.info["name"] == HOST_NAME and _target(process, 1) == log:
                return process
        return None

    def all(self) -> set[psutil.Process]:
        """All running processes."""
        roots = [self.supervisor, self.rank_host]
        found = {process for root in roots if root for process in _tree(root)}
        return {process for process in found if runs(process)}

    def census(self) -> Counter[str]:
        """The number of running processes of each kind."""
        return Counter(map(self._kind, self.all()))

    def _kind(self, process: psutil.Process) -> str:
        command = _command(process)
        if process == self.supervisor:
            return "process supervisor"
        for name, word in HELPERS.items():
            if word in command:
                return name
        if is_rank(process):
            return "rank"
        if process == self.rank_host:
            return "rank host"
        return "rank parent" if "-S" in command else " ".join(command)

    def describe(self) -> str:
        """The running processes, for a message."""
        return f"running: {dict(self.census())}"

    def in_memory(self) -> set[str]:
        """The names of its files in shared memory."""
        try:
            return {path.name for path in self.memory.iterdir()}
        except FileNotFoundError:
            return set()

    @cached_property
    def memory(self) -> Path:
        """Its folder in shared memory, or its run folder.

        The first call must be made while the cluster runs.
        """
        return memory_folder(self.run_dir)


class StartingRank:
    """A rank that starts, described by its file in the cluster's folder.

    Args:
        run_dir: the cluster's folder.
        rank: its number.
        again: whether earlier processes with this number are ignored.
    """

    def __init__(self, run_dir: Path, rank: int, *, again: bool = True) -> None:
        self._run_dir, self._pattern = run_dir, f"rank{rank}*.stage"
        self._before = set(run_dir.glob(self._pattern)) if again else set()

    @property
    def stage(self) -> str | None:
        """The stage of its start; None if it has not begun."""
        record = self._record()
        return None if record is None else record["stage"]

    def parent(self) -> psutil.Process | None:
        """Its parent process."""
        record = self._record()
        return None if record is None else psutil.Process(record["parent_pid"])

    def process(self) -> psutil.Process | None:
        """The process of the rank; None if only its parent runs.

        A forked rank reports its second stage a few milliseconds after the fork.
        """
        record = self._record()
        if record is None:
            return None
        if record["pid"] != record["parent_pid"]:
            return psutil.Process(record["pid"])
        return next(iter(psutil.Process(record["pid"]).children()), None)

    def _record(self) -> dict[str, Any] | None:
        new = set(self._run_dir.glob(self._pattern)) - self._before
        return json.loads(max(new).read_text()) if new else None


def is_rank(process: psutil.Process) -> bool:
    """Whether a process is a rank, or was forked by a rank."""
    command = _command(process)
    return command[:2] == ["nbdist", "rank"] and command[2] != "host"


def census(infos: Sequence[RankInfo]) -> dict[str, int]:
    """The expected `ClusterProcesses.census`, if the ranks have no children."""
    of_all = {"process supervisor": 1, "controller": 1, "mpiexec": 1}
    of_ranks = {"rank": len(infos), "rank parent": len(infos)}
    is_forked = any(info.started == FORKED for info in infos)
    return {**of_all, **of_ranks, **({"rank host": 1} if is_forked else {})}


def _tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> list[str]:
    """The command line; empty if the process has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _target(process: psutil.Process, descriptor: int) -> str:
    """The target of a descriptor of a process; "" if the process has ended."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/{descriptor}")
    except OSError:  # or another user's
        return ""
