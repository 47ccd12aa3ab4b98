"""The notebook's connection to the process supervisor and to the programs it runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from nbdist.clusters.startup_status import tail_of
from nbdist.errors import ClusterError
from nbdist.ipc.busy_host import stretched
from nbdist.ipc.fork_messages import RANK_HOST
from nbdist.ipc.locks import Condition, Event
from nbdist.ipc.private_files import remove_folders
from nbdist.ipc.process_files import describe_exit

__all__ = ["Loss", "SupervisorClient"]


class Loss(NamedTuple):
    """The end of a process on which the ranks depend."""

    reason: str
    """A sentence that says which process has ended, and how."""
    is_cause: bool
    """Whether it ends the ranks. False for an `mpiexec` that exits because its ranks
    have ended."""
    pid: int
    aborted: bool = False
    """Whether it has ended itself with SIGABRT, as PRRTE does on an error."""


class SupervisorClient:
    """Starts a process supervisor, and starts and stops programs through it.

    When this client is closed, or this process ends, the process supervisor ends all
    programs and removes `run_dir` and the folders given to `remove_at_end`. A second
    `close` does nothing.
    """

    def __init__(self, run_dir: Path, *, together: bool = True) -> None:
        """Start the process supervisor.

        Args:
            run_dir: An existing folder with no other use; removed at the end.
            together: Whether all programs end when one does.
        """
        self.run_dir = run_dir
        self._folders = [run_dir]
        self._together = together
        self._changed = Condition()
        self._pids: dict[str, int] = {}
        self._exit_codes: dict[str, int] = {}
        self._apart: set[str] = set()
        """The programs whose end is no loss."""
        self._closed = self._ended = False
        self._on_loss: Callable[[Loss], None] | None = None
        self.on_note: Callable[[str], None] = lambda _: None
        """Called on a thread when a stopped helper process has been continued."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "nbdist.clusters.process_supervisor",
                str(run_dir),
                *([] if together else ["--apart"]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            cwd=Path(__file__).parents[2],  # where `nbdist` can be imported from
        )
        self._reader = threading.Thread(
            target=self._read, name="nbdist-supervisor-client", daemon=True
        )
        self._watch = HelperWatch(lambda note: self.on_note(note))
        self._watch.add(SUPERVISOR, self._process.pid)
        self._reader.start()

    def start(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> None:
        """Start a program whose output goes to `log(name)`.

        Args:
            name: The name of the program for the other methods.
            argv, env: Its command line and environment.
            options: `cwd`, its working folder; `memory`, the most bytes it may use;
                `module`, a module and its arguments, which the cluster's rank host runs
                in a forked process instead.

        Raises:
            ClusterError: The process supervisor has ended.
        """
        order = {
            "start": name,
            "argv": list(argv),
            "env": dict(env),
            "log": str(self.log(name)),
            **options,
        }
        if not self._order(order):
            raise ClusterError(
                f"cannot start {name}: the process supervisor has ended; start again"
            )

    def start_apart(self, name: str, argv: Sequence[str]) -> None:
        """Start a program in this process's environment, whose end is no loss.

        Raises:
            ClusterError: As for `start`.
        """
        self._apart.add(name)
        self.start(name, argv, os.environ, apart=True)

    def attend_rank_host(self, path: Path, fork_server: int) -> None:
        """Have the process supervisor end the forked ranks with the others.

        Args:
            path: The listening socket of the cluster's rank host. Called before
                anything else connects there.
            fork_server: The pid of the process that is to fork the rank host.
        """
        self._watch.add(FORK_SERVER, fork_server)
        self._order({"rank_host": str(path)})

    def remove_at_end(self, folder: Path) -> None:
        """Also remove this folder at the end. Call it before the folder is made."""
        self._folders.append(folder)
        self._order({"remove": str(folder)})

    def stop(self, names: Sequence[str]) -> None:
        """Ask the process supervisor to end some programs, without waiting."""
        self._order({"stop": list(names)})

    def _order(self, order: dict[str, Any]) -> bool:
        """Send an order to the process supervisor; False if it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return False
        return True

    def wait(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until a condition holds, or the process supervisor has ended.

        Args:
            condition: Evaluated when a program has started or ended. It may call this
                client.
            timeout_s: The longest wait; None for no limit.

        Returns:
            Whether the condition holds.
        """
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._ended, timeout_s)
        return condition()

    def log(self, name: str) -> Path:
        """The file of a program's standard output and error."""
        return self.run_dir / f"{name}.log"

    def exit_code(self, name: str) -> int | None:
        """Exit code of a program, negative for a signal; None while it runs."""
        with self._changed:
            return self._exit_codes.get(name)

    @property
    def first_exit(self) -> tuple[str, int] | None:
        """The program that ended first, because of which the others end, and its code.

        None while all of them run.
        """
        with self._changed:
            return next(iter(self._losses().items()), None)

    def _losses(self) -> dict[str, int]:
        """The exit codes of programs with which the others end, in their order."""
        return {k: v for k, v in self._exit_codes.items() if k not in self._apart}

    def pid(self, name: str) -> int | None:
        with self._changed:
            return self._pids.get(name)

    @property
    def pids(self) -> list[int]:
        """The process supervisor, and each program with which the others end."""
        with self._changed:
            others = [pid for k, pid in self._pids.items() if k not in self._apart]
            return [self._process.pid, *others]

    @property
    def alive(self) -> bool:
        return self.own_exit_code is None

    @property
    def own_exit_code(self) -> int | None:
        """Exit code of the process supervisor, -N for signal N; None while it runs."""
        return self._process.poll()

    def errors(self) -> str:
        """The last lines that the process supervisor has written on its standard
        error, after a line break; "" if there are none."""
        with contextlib.suppress(ValueError):  # `close` has closed it
            size = os.fstat(self._errors.fileno()).st_size
            text = os.pread(self._errors.fileno(), size, 0).decode(errors="replace")
            return text and f":\n{tail_of(text)}"
        return ""

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        """Call back, on a thread, when a program or the process supervisor has ended.

        The callback is called at most once, and never after `close`.
        """
        with self._changed:
            self._on_loss = callback
            lost = self._losses()
            if self._ended:
                lost[SUPERVISOR] = self._process.wait()
        for name, code in lost.items():
            self._report_loss(name, code)

    def close(self, timeout_s: float = 10.0) -> None:
        """End all programs, and return when they have ended.

        Raises:
            ClusterError: Some did not end within `timeout_s` seconds, or longer on a
                busy host.
        """
        self._closed = True
        self._watch.close()
        timeout_s = stretched(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)  # in case it was stopped
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"the cluster's processes did not end within {timeout_s:.0f} s; "
                f"process supervisor {self._process.pid} is still ending them"
            ) from error
        self._errors.close()
        remove_folders(*self._folders)  # in case the process supervisor was killed

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            record = json.loads(line)
            with self._changed:
                self._changed.notify_all()
                if "started" in record:
                    self._pids[record["started"]] = record["pid"]
                    if record["started"] == RANK_HOST:
                        self._watch.discard(FORK_SERVER)
                    if self._together:
                        self._watch.add(record["started"], record["pid"])
                    continue
                self._exit_codes[record["exited"]] = record["code"]
            if record["exited"] not in self._apart:
                self._report_loss(record["exited"], record["code"])
        self._process.stdout.close()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if not self._closed:
            self._report_loss(SUPERVISOR, self._process.wait())
            remove_folders(*self._folders)

    def _report_loss(self, name: str, code: int) -> None:
        with self._changed:
            callback = None if self._closed else self._on_loss
            self._on_loss = None if callback else self._on_loss
        if callback is not None:
            how = describe_exit(code)
            reason = f"{name} has ended with {how}, and all ranks with it"
            if name == SUPERVISOR:
                reason += self.errors()
            is_cause = name != "mpiexec" or code < 0
            pid = self.pid(name) or self._process.pid
            callback(Loss(reason, is_cause, pid, aborted=code == -signal.SIGABRT))


SUPERVISOR = "the process supervisor"
FORK_SERVER = "the fork server"
LOOK_S = 0.5


class HelperWatch:
    """Continues helper processes that were stopped (SIGSTOP).

    A thread polls them twice a second, because Linux does not report a stop to it.

    Args:
        on_note: Called with a description of each process that was continued.
    """

    def __init__(self, on_note: Callable[[str], None]) -> None:
        self._on_note = on_note
        self._helpers: dict[str, psutil.Process] = {}
        self._lock = threading.Lock()
        self._closed = Event()
        self._thread = threading.Thread(
            target=self._run, name="nbdist-helper-watch", daemon=True
        )
        self._thread.start()

    def add(self, name: str, pid: int) -> None:
        """Watch a process, unless it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess), self._lock:
            self._helpers[name] = psutil.Process(pid)

    def discard(self, name: str) -> None:
        """Stop watching a process."""
        with self._lock:
            self._helpers.pop(name, None)

    def close(self) -> None:
        """Stop watching. A second close does nothing."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            with self._lock:
                helpers = dict(self._helpers)
            for name, process in helpers.items():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._look(name, process)

    def _look(self, name: str, process: psutil.Process) -> None:
        if process.status() == psutil.STATUS_STOPPED:
            process.send_signal(signal.SIGCONT)
            self._on_note(
                f"{name} (pid {process.pid}) was stopped, and has been continued: the "
                "ranks cannot do without it"
            )
