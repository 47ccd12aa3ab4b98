"""Runs a command, and counts the CPU seconds of all its descendants.

    python tests/cpu_seconds.py [--limit FILE] COMMAND [ARGUMENT ...]

Orphans become children of this process: the ranks of a cluster descend from one, and
nobody else would count them. With --limit, more seconds than the number in a file are
an error.

As a plugin of pytest below such a process (`-p tests.cpu_seconds`), it adds the seconds
and the tests of each file to out/durations.json, if NBDIST_DURATIONS is set.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbdist.ipc.prctl import adopt_orphans

GRACE_S = 10.0
"""Seconds that orphans may take to end after the command has."""
ROOT = Path(__file__).parent.parent
REPORT = ROOT / "out" / "durations.json"


def run(command: list[str]) -> int:
    """Run a command, and reap it and all orphans. Returns its exit code."""
    adopt_orphans()  # on Linux; elsewhere, they are not counted
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, preexec_fn=default)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    status = None
    end = float("inf")
    while time.monotonic() < end:
        try:
            pid, ended = os.waitpid(-1, 0 if status is None else os.WNOHANG)
        except ChildProcessError:
            break
        if pid == process.pid:
            status, end = ended, time.monotonic() + GRACE_S
        elif pid == 0:
            time.sleep(0.05)
    assert status is not None
    return os.waitstatus_to_exitcode(status)


def exceeded(limit: Path) -> str:
    """What is said if the descendants used more than a file allows; else ""."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, allowed = used.ru_utime + used.ru_stime, float(limit.read_text())
    print(f"{seconds:.0f} of {allowed:.0f} CPU seconds ({limit})")
    return f"more CPU seconds than {limit} allows" if seconds > allowed else ""


class PerFile:
    """Adds the seconds of each file to the report.

    The tests of a file include the fixtures that end with it. A session's fixtures
    belong to the first file that uses them.
    """

    def __init__(self) -> None:
        above = psutil.Process().parents()
        name = Path(__file__).name
        counting = (p for p in above if any(name in word for word in p.cmdline()))
        self._root = next(counting, psutil.Process())
        self._before = self._seconds()
        self.files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])

    def _seconds(self) -> float:
        """The CPU seconds of all processes, running and ended."""
        total = 0.0
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                total += sum(process.cpu_times()[:4])
            except psutil.NoSuchProcess:  # its parent's times have its own
                continue
        return total

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[Any]:
        done = yield
        of_file = self.files[item.path.relative_to(ROOT).as_posix()]
        of_file[1] += 1
        if nextitem is None or nextitem.path != item.path:
            now = self._seconds()
            of_file[0] += now - self._before
            self._before = now
        return done

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        worker = getattr(session.config, "workeroutput", None)
        if worker is not None:
            worker["cpu_seconds"] = dict(self.files)
            return
        written = json.loads(REPORT.read_text()) if REPORT.exists() else {}
        for file, (seconds, tests) in self.files.items():
            before = written.get(file, {"cpu_s": 0, "tests": 0})
            written[file] = {
                "cpu_s": round(before["cpu_s"] + seconds, 1),
                "tests": before["tests"] + tests,
            }
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})  # a worker that died has none
        for file, (seconds, tests) in output.get("cpu_seconds", {}).items():
            self.files[file][0] += seconds
            self.files[file][1] += tests


def pytest_configure(config: pytest.Config) -> None:
    """Count if NBDIST_DURATIONS is set."""
    if os.environ.get("NBDIST_DURATIONS"):
        config.pluginmanager.register(PerFile())


if __name__ == "__main__":
    limit, command = None, sys.argv[1:]
    if command[0] == "--limit":
        limit, command = Path(command[1]), command[2:]
    sys.exit(run(command) or (limit and exceeded(limit)) or 0)
