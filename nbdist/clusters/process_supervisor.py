"""The process supervisor: the ancestor of every process that a cluster starts.

`python -m nbdist.clusters.process_supervisor RUN_DIR` reads JSON objects, one per line,
from its standard input:

- `{"start": name, "argv": [...], "env": {...}, "log": path}` starts a program. The
  optional "cwd" is its working folder, and "memory" limits its bytes. The end of an
  "apart" program does not end the others, and it goes on when they end. The optional
  "module" has a module and its arguments, which the cluster's rank host runs in a
  forked process. Without a rank host, "argv" is run.
- `{"stop": [name, ...]}` ends some programs.
- `{"remove": path}` names one more folder to be removed at the end.
- `{"rank_host": path}` connects to the cluster's rank host, which is then reported as a
  program is.

It writes `{"started": name, "pid": pid}` to its standard output, and
`{"exited": name, "code": code}` once the program has ended.

When its input closes or its parent ends, whatever the reason, the process supervisor
ends every process below it and removes RUN_DIR and the folders that were named to it.
Cleaning up therefore does not depend on the notebook. When one program ends,
the others end too, unless `--apart` was given. If the process supervisor itself is
killed, Linux signals its programs to end.

Imports only the standard library and psutil, so that it starts fast and stays small.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from nbdist.ipc import pidfd
from nbdist.ipc.fork_messages import (
    FORK_TIMEOUT_S,
    RANK_HOST,
    receive,
    request,
    send,
    socket_address,
)
from nbdist.ipc.prctl import adopt_orphans, die_with_parent
from nbdist.ipc.private_files import remove_folders
from nbdist.ipc.process_files import remove_all_cuda_files

TERMINATE_GRACE_S = 2.0
"""Seconds from SIGTERM to SIGKILL."""
PARENT_LOOK_S = 0.5
CANNOT_START = 127
"""The exit code of a program that cannot be started, as a shell has it."""
HOST_TIMEOUT_S = 10.0
"""Seconds in which a rank host that runs takes a request."""


class ProcessSupervisor:
    """Starts programs, reports when they end, and ends them all when it ends."""

    def __init__(self, run_dir: Path, *, together: bool = True) -> None:
        self._folders = [run_dir]
        self._together = together
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._apart: set[str] = set()
        """The programs whose end does not end the others, and the reverse."""
        self._seen: set[psutil.Process] = set()
        self._selector = selectors.DefaultSelector()
        self._host_socket = Path()
        self._host_connection: socket.socket | None = None
        self._rank_host: psutil.Process | None = None
        self._forked: set[socket.socket] = set()
        """The connections on which the rank host has forked a program."""
        self._to_fork: list[dict[str, Any]] = []
        """Orders to start programs that wait for the rank host."""
        self._look_s: float | None = PARENT_LOOK_S
        """Seconds between two looks at the parent; None where its end is an event."""
        self._fork_by = 0.0
        """When they are started without it, on the monotonic clock."""

    def serve(self) -> None:
        """Carry out orders from standard input until it closes, then end everything."""
        adopt_orphans()
        wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for terminating in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(terminating, lambda *_: sys.exit(0))
        try:
            with self._selector as selector:
                selector.register(0, selectors.EVENT_READ)
                selector.register(wakeup_read, selectors.EVENT_READ)
                # A forked child of the notebook may keep our input open.
                self._parent = os.getppid()
                descriptor = pidfd.opened(self._parent)
                if descriptor is not None:
                    selector.register(descriptor, selectors.EVENT_READ)
                    self._look_s = None
                self._loop(selector, wakeup_read)
        finally:
            for terminating in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(terminating, signal.SIG_IGN)
            self._apart.clear()
            self._end_processes()
            remove_all_cuda_files(self._folders[0])
            remove_folders(*self._folders)

    def _loop(self, selector: selectors.BaseSelector, wakeup: int) -> None:
        pending = b""
        while True:
            for key, _ in selector.select(_sooner(self._patience_s(), self._look_s)):
                if key.fd == wakeup:
                    os.read(wakeup, 4096)
                    continue
                if key.data is not None:
                    key.data()
                    continue
                received = os.read(0, 1 << 20) if key.fd == 0 else b""
                if not received:
                    return
                *lines, pending = (pending + received).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            if self._look_s is not None and os.getppid() != self._parent:
                return
            if self._patience_s() == 0.0:
                self._start_without_host()
            self._report_exits()

    def _patience_s(self) -> float | None:
        """How long to wait for the rank host; None where nothing waits for it."""
        if not self._to_fork:
            return None
        return max(0.0, self._fork_by - time.monotonic())

    def _obey(self, order: dict[str, Any]) -> None:
        if "stop" in order:
            self._stop(order["stop"])
        elif "remove" in order:
            self._folders.append(Path(order["remove"]))
        elif "rank_host" in order:
            self._connect_rank_host(order["rank_host"])
        elif "module" in order and self._host_connection is not None:
            self._fork_by = time.monotonic() + FORK_TIMEOUT_S
            self._to_fork.append(order)
            if self._rank_host is not None:
                self._fork_programs()
        else:
            self._start(order)

    def _connect_rank_host(self, path: str) -> None:
        """Be the first client of the cluster's rank host, which lives as long as this.

        It may be forked only later, and answers then. Where the fork server has ended,
        each rank parent starts its rank.
        """
        self._host_socket = Path(path)
        try:
            self._host_connection = connection = self._connected()
        except OSError:
            return
        self._await(connection, lambda: self._hear_rank_host(connection))

    def _connected(self) -> socket.socket:
        """A new connection with the rank host.

        Raises:
            OSError: It has ended.
        """
        connection = socket.socket(socket.AF_UNIX)
        try:
            with socket_address(self._host_socket) as address:
                connection.connect(address)
        except OSError:
            connection.close()
            raise
        return connection

    def _await(self, connection: socket.socket, callback: Callable[[], None]) -> None:
        """Have a function called for each message, and for the end of a connection."""
        self._selector.register(connection, selectors.EVENT_READ, callback)

    def _hear_rank_host(self, connection: socket.socket) -> None:
        """Its first message, or its end, with which all that it has forked ends."""
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if (received := receive(connection)) is not None:
                self._rank_host = psutil.Process(received[0]["pid"])
                self._tell({"started": RANK_HOST, "pid": self._rank_host.pid})
                self._fork_programs()
                return
        self._selector.unregister(connection)
        connection.close()
        self._host_connection = None
        self._start_without_host()
        if self._rank_host is not None:
            self._tell({"exited": RANK_HOST, "code": -signal.SIGKILL})
            self._end_processes()

    def _fork_programs(self) -> None:
        """Have the rank host fork the programs that wait for it."""
        orders, self._to_fork = self._to_fork, []
        for order in orders:
            try:
                self._fork(order)
            except OSError:
                self._start(order)

    def _fork(self, order: dict[str, Any]) -> None:
        """Ask the rank host for a program, which ends with this process.

        Raises:
            OSError: The rank host has ended, or does not answer.
        """
        module, *arguments = order["module"]
        message = request(
            arguments,
            module=module,
            environment=order["env"],
            folder=order.get("cwd"),
        )
        connection = self._connected()
        connection.settimeout(HOST_TIMEOUT_S)
        try:
            with open(os.devnull) as nothing, open(order["log"], "ab") as log:
                streams = [each.fileno() for each in (nothing, log, log)]
                send(connection, message, streams)
        except OSError:
            connection.close()
            raise
        self._await(connection, lambda: self._hear_forked(order, connection))

    def _hear_forked(self, order: dict[str, Any], connection: socket.socket) -> None:
        """That a program was forked or refused, or how it has ended."""
        message: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            if (received := receive(connection, descriptors=1)) is not None:
                message, handles = received
                for handle in handles:
                    os.close(handle)
        if "pid" in message:
            self._forked.add(connection)
            self._tell({"started": order["start"], "pid": message["pid"]})
            return
        self._selector.unregister(connection)
        connection.close()
        if "code" in message:
            self._tell({"exited": order["start"], "code": message["code"]})
            if self._together:
                self._end_processes()
        elif connection not in self._forked:
            self._start(order)
        # Else the rank host has ended, whose own connection says so.
        self._forked.discard(connection)

    def _start_without_host(self) -> None:
        """Start the programs that wait for the rank host."""
        orders, self._to_fork = self._to_fork, []
        for order in orders:
            self._start(order)

    def _start(self, order: dict[str, Any]) -> None:
        with open(order["log"], "ab") as log:
            try:
                program: subprocess.Popen[bytes] | None = self._program(order, log)
            except OSError as error:  # its folder or file is gone: it fails alone
                log.write(f"cannot start {order['argv'][0]}: {error}\n".encode())
                program = None
        if program is None:
            self._tell({"exited": order["start"], "code": CANNOT_START})
            return
        self._programs[order["start"]] = program
        if order.get("apart"):
            self._apart.add(order["start"])
        self._tell({"started": order["start"], "pid": program.pid})

    def _program(self, order: dict[str, Any], log: BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            order["argv"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=order["env"],
            cwd=order.get("cwd"),
            start_new_session=True,  # Ctrl-C in a terminal must not reach it
            preexec_fn=lambda: _prepare(order.get("memory")),
        )

    def _report_exits(self) -> None:
        exited = {
            name: code
            for name, program in self._programs.items()
            if (code := program.poll()) is not None
        }
        for name, code in exited.items():
            del self._programs[name]
            self._tell({"exited": name, "code": code})
        if exited.keys() - self._apart and self._together:
            self._end_processes()

    def _tell(self, record: dict[str, Any]) -> None:
        try:
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            pass  # the notebook has ended: our input closes next

    def _remember_descendants(self) -> None:
        """Remember all descendants: their parents may end before they do."""
        self._seen.update(psutil.Process().children(recursive=True))
        if self._rank_host is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen.update(self._rank_host.children(recursive=True))
                self._seen.add(self._rank_host)
        for name in self._apart & self._programs.keys():
            self._seen -= _family(self._programs[name].pid)

    def _stop(self, names: list[str]) -> None:
        """End these programs and their descendants."""
        programs = [self._programs[name] for name in names if name in self._programs]
        families = {program: _family(program.pid) for program in programs}
        _terminated({process for each in families.values() for process in each})
        deadline = time.monotonic() + TERMINATE_GRACE_S
        for program, family in families.items():
            # psutil.wait_procs would reap the exit code before `program.wait`.
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(max(0.0, deadline - time.monotonic()))
            _signal_all(family, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(TERMINATE_GRACE_S)
            own = psutil.Process().children()
            psutil.wait_procs(family & set(own), timeout=TERMINATE_GRACE_S)

    def _end_processes(self) -> None:
        """End all processes but the programs that are apart."""
        self._remember_descendants()
        living = _terminated(self._seen)
        _, living_list = psutil.wait_procs(living, timeout=TERMINATE_GRACE_S)
        self._seen = set(living_list)
        self._remember_descendants()
        living = _signal_all(self._seen, signal.SIGKILL)
        psutil.wait_procs(living, timeout=TERMINATE_GRACE_S)


def _sooner(first: float | None, second: float | None) -> float | None:
    """The shorter of two times; None is for ever."""
    return min((each for each in (first, second) if each is not None), default=None)


def _family(pid: int) -> set[psutil.Process]:
    """A process and its descendants."""
    try:
        process = psutil.Process(pid)
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def _prepare(memory: int | None) -> None:
    """Set up a new process before it executes its program."""
    # SIGTERM lets a program end its own children first.
    die_with_parent(signal.SIGTERM)
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


def _signal_all(processes: set[psutil.Process], signum: int) -> set[psutil.Process]:
    """Signal the processes, and return those that still run.

    psutil does not mistake a process that reuses a pid for its previous owner.
    """
    living = set()
    for process in processes:
        try:
            process.send_signal(signum)
            living.add(process)
        except psutil.NoSuchProcess:
            continue
    return living


def _terminated(processes: set[psutil.Process]) -> set[psutil.Process]:
    """Send SIGTERM to processes, and return those that still run."""
    living = _signal_all(processes, signal.SIGTERM)
    # A stopped process handles SIGTERM only once it is continued.
    _signal_all(living, signal.SIGCONT)
    return living


if __name__ == "__main__":
    ProcessSupervisor(Path(sys.argv[1]), together="--apart" not in sys.argv).serve()
