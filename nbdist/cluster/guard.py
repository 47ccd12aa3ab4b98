"""The process that owns everything a cluster starts, and outlives nobody.

`python -m nbdist.cluster.guard RUN_DIR` reads one JSON object per line from its
standard input, `{"start": name, "argv": [...], "env": {...}, "log": path}`, and starts
that program. It answers on its standard output with `{"started": name, "pid": pid}` and
later `{"exited": name, "code": code}`. When its input closes or its parent ends, for
whatever reason (the notebook stopped the cluster, restarted, or was killed), it ends
every process below it, however deep and however unwilling, and removes RUN_DIR. So
cleaning up depends on nothing that the notebook must still be alive to do. When a
program ends, all others end with it: none is of use alone. And should the guard itself
be killed, Linux tells its programs to end.

Imports the standard library and psutil alone: it must start fast and stay small.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from nbdist.engine.lifeline import adopt_orphans, die_with_parent

MEMORY_FOLDER = Path("/dev/shm")
TERMINATE_GRACE_S = 2.0
"""How long processes have to end by themselves after SIGTERM."""


class Guard:
    """Starts programs, reports their ends, and takes all of them down at the end."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._seen: set[psutil.Process] = set()

    def serve(self) -> None:
        """Obey standard input until it closes; then end everything."""
        adopt_orphans()
        wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for terminating in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(terminating, lambda *_: sys.exit(0))
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(0, selectors.EVENT_READ)
                selector.register(wakeup_read, selectors.EVENT_READ)
                if hasattr(os, "pidfd_open"):
                    # A process that the notebook forked may hold our input open.
                    selector.register(os.pidfd_open(os.getppid()), selectors.EVENT_READ)
                self._loop(selector, wakeup_read)
        finally:
            for terminating in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(terminating, signal.SIG_IGN)
            self._end_processes()
            remove_traces(self._run_dir)

    def _loop(self, selector: selectors.BaseSelector, wakeup: int) -> None:
        pending = b""
        while True:
            for key, _ in selector.select():
                if key.fd == wakeup:
                    os.read(wakeup, 4096)
                    continue
                received = os.read(0, 1 << 20) if key.fd == 0 else b""
                if not received:
                    return
                *lines, pending = (pending + received).split(b"\n")
                for line in lines:
                    self._start(json.loads(line))
            self._report_exits()

    def _start(self, order: dict[str, Any]) -> None:
        with open(order["log"], "ab") as log:
            program = subprocess.Popen(
                order["argv"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=order["env"],
                start_new_session=True,  # a Ctrl-C in a terminal is not for them
                # These end what they have started themselves when asked to.
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )
        self._programs[order["start"]] = program
        self._tell({"started": order["start"], "pid": program.pid})

    def _report_exits(self) -> None:
        exited = {
            name: code
            for name, program in self._programs.items()
            if (code := program.poll()) is not None
        }
        for name, code in exited.items():
            del self._programs[name]
            self._tell({"exited": name, "code": code})
        if exited:
            self._end_processes()

    def _tell(self, record: dict[str, Any]) -> None:
        try:
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            pass  # nobody listens any more: the end of the input will follow

    def _remember_descendants(self) -> None:
        """Keep hold of processes whose parent may be gone when the end comes."""
        self._seen.update(psutil.Process().children(recursive=True))

    def _end_processes(self) -> None:
        self._remember_descendants()
        living = _signal_all(self._seen, signal.SIGTERM)
        # A stopped process acts on SIGTERM only once it is continued.
        _signal_all(living, signal.SIGCONT)
        _, living_list = psutil.wait_procs(living, timeout=TERMINATE_GRACE_S)
        self._seen = set(living_list)
        self._remember_descendants()
        living = _signal_all(self._seen, signal.SIGKILL)
        psutil.wait_procs(living, timeout=TERMINATE_GRACE_S)


def remove_traces(run_dir: Path) -> None:
    """Remove a cluster's files: its folder, and what lies in shared memory."""
    for path in MEMORY_FOLDER.glob(f"{run_dir.name}-*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(run_dir, ignore_errors=True)


def _signal_all(processes: set[psutil.Process], signum: int) -> set[psutil.Process]:
    """Signal those that still live; psutil tells a reused pid from its old owner."""
    living = set()
    for process in processes:
        try:
            process.send_signal(signum)
            living.add(process)
        except psutil.NoSuchProcess:
            continue
    return living


if __name__ == "__main__":
    Guard(Path(sys.argv[1])).serve()
