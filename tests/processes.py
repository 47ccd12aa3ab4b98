"""Finds the processes that a process has started, and waits for their end.

Processes are not found by name, because other clusters may run.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import psutil

HANG_S = 60.0
"""Seconds after which something is said to hang, on a machine that is busy as well."""
GONE_WITHIN_S = HANG_S


class Footprint:
    """The descendants of processes, and the files that they have open or mapped.

    It is taken while they live, so that `assert_gone` knows what must be gone.
    """

    def __init__(self, pids: Iterable[int], *paths: Path) -> None:
        roots = [psutil.Process(pid) for pid in pids]
        self.processes = {
            process
            for root in roots
            for process in [root, *root.children(recursive=True)]
        }
        self.paths = {*paths, *self._shared_memory()}

    def _shared_memory(self) -> set[Path]:
        mapped = set()
        for process in self.processes:
            for region in process.memory_maps():
                if region.path.startswith("/dev/shm/"):
                    mapped.add(Path(region.path))
        return mapped

    def assert_gone(self, within_s: float = GONE_WITHIN_S) -> None:
        """Check that no process and no file is left after some seconds.

        Polled, because `psutil.wait_procs` would take the exit code of a child of this
        process away from the `subprocess.Popen` that waits for it.
        """
        deadline = time.monotonic() + within_s
        wait_until(
            lambda: not any(map(runs, self.processes)),
            within_s,
            lambda: f"left: {[_describe(p) for p in self.processes if runs(p)]}",
        )
        wait_until(
            lambda: not any(path.exists() for path in self.paths),
            max(1.0, deadline - time.monotonic()),
            lambda: f"left: {[str(path) for path in self.paths if path.exists()]}",
        )


def wait_until(
    condition: Callable[[], bool],
    within_s: float = HANG_S,
    explain: Callable[[], str] = lambda: "it did not come",
) -> None:
    """Poll for a condition that raises no event in this process."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"after {within_s} s: {explain()}"
        time.sleep(0.02)


def stop(pid: int) -> None:
    """Stop a process by SIGSTOP. When this returns, none of its threads runs."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")

    def has_stopped() -> bool:
        return all(
            task.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "T"
            for task in tasks.iterdir()
        )

    wait_until(has_stopped, HANG_S, lambda: f"process {pid} did not stop")


def runs(process: psutil.Process) -> bool:
    """Whether a process exists. A stopped process does; a zombie does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Program:
    """A Python program with pipes for lines of text. It is killed at the end."""

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # else a line could wait in a buffer that select does not see
        )
        self.pid = self._process.pid

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the program with SIGKILL."""
        self._process.kill()
        with self._process:
            pass

    def line(self, within_s: float = 60.0) -> str:
        """The next line that the program prints."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(within_s), f"no line within {within_s} s"
        return self._process.stdout.readline().decode().rstrip("\n")

    def tell(self, text: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\n")


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return str(process.pid)


def left_in(folder: Path) -> list[Path]:
    """The files in a folder that is for temporary files.

    torch makes folders there: 2.7 one with a module at its import, which only a process
    that is not killed removes, and 2.15 that of its compiler. They are left out.
    """
    return sorted(path for path in folder.iterdir() if not _is_of_torch(path))


def _is_of_torch(path: Path) -> bool:
    if path.name.startswith("torchinductor_"):
        return True
    if not version("torch").startswith("2.7"):
        return False
    return (path / "_remote_module_non_scriptable.py").exists() or (
        path.name.startswith("tmp") and path.is_dir() and not any(path.iterdir())
    )
