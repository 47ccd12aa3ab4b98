"""The processes of a cluster, by what they are."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from nbdist import Cluster
from nbdist.ipc.private_files import memory_folder
from tests.chaos.draw import RANKS

__all__ = ["CENSUS", "Coming", "Family", "process_supervisors"]

CENSUS = {
    "process_supervisor": 1,
    "controller": 1,
    "--with-ft": 1,
    "-m nbdist.engine": RANKS,
    "a rank's parent": RANKS,
}
"""The processes of a whole cluster whose ranks have no children, by kind."""


def process_supervisors() -> set[psutil.Process]:
    """The process supervisors that this process has started."""
    children = psutil.Process().children()
    return {p for p in children if "nbdist.cluster.process_supervisor" in _command(p)}


class Family:
    """A process supervisor and all that is below it.

    Args:
        supervisor: its first process.
    """

    def __init__(self, supervisor: psutil.Process) -> None:
        self.supervisor = supervisor
        folders = [Path(word) for word in supervisor.cmdline() if word.startswith("/")]
        self.run_dir = next(path for path in reversed(folders) if path.is_dir())

    @classmethod
    def of(cls, cluster: Cluster) -> Family:
        """That of a running cluster; this process may have others.

        Raises:
            ValueError, psutil.NoSuchProcess: No rank lives.
        """
        first, *_ = cluster.ranks
        above = psutil.Process(first.pid).parents()
        (supervisor,) = process_supervisors().intersection(above)
        return cls(supervisor)

    def helper(self, name: str) -> psutil.Process | None:
        """ "process supervisor", "controller" or "mpiexec"; None before it runs."""
        if name == "process supervisor":
            return self.supervisor
        word = {"controller": "controller", "mpiexec": "--with-ft"}[name]
        found = [p for p in _children(self.supervisor) if word in _command(p)]
        return found[0] if found else None

    def census(self) -> dict[str, int]:
        """How many processes of each kind run."""
        try:
            processes = [self.supervisor, *self.supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return {}
        commands = [_command(p) for p in processes if _runs(p)]
        kinds = [_kind(command) for command in commands if command]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    def describe(self) -> str:
        """The processes that run, for a message."""
        return f"running: {self.census()}"

    def in_memory(self) -> set[str]:
        """The names of its files in shared memory."""
        try:
            return {path.name for path in self.memory.iterdir()}
        except FileNotFoundError:
            return set()

    @cached_property
    def memory(self) -> Path:
        """Its folder in shared memory, or else its run folder.

        Looked up for the first time while the cluster runs.
        """
        return memory_folder(self.run_dir)


class Coming:
    """A rank on its way up, as its file in the cluster's folder shows it.

    Args:
        run_dir: the cluster's folder.
        rank: its number.
        again: whether processes of this number that were there before do not count.
    """

    def __init__(self, run_dir: Path, rank: int, *, again: bool = True) -> None:
        self._run_dir, self._pattern = run_dir, f"rank{rank}*.stage"
        self._before = set(run_dir.glob(self._pattern)) if again else set()

    @property
    def stage(self) -> str | None:
        """What it does; None where it has not begun."""
        record = self._record()
        return None if record is None else record["stage"]

    def parent(self) -> psutil.Process | None:
        """Its parent process."""
        record = self._record()
        if record is None:
            return None
        process = psutil.Process(record["pid"])
        # Its first stage is told by its parent.
        return process if record["stage"] == "starting Python" else process.parent()

    def process(self) -> psutil.Process | None:
        """The rank itself; None as long as its parent is alone."""
        return next(iter(_children(self.parent())), None)

    def _record(self) -> dict[str, Any] | None:
        new = set(self._run_dir.glob(self._pattern)) - self._before
        return json.loads(max(new).read_text()) if new else None


def _children(process: psutil.Process | None) -> list[psutil.Process]:
    return [] if process is None else process.children()


def _command(process: psutil.Process) -> str:
    """The command line; "" of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _kind(command: str) -> str:
    known = next((word for word in CENSUS if word in command), "")
    return known or ("a rank's parent" if " -S " in command else command)
