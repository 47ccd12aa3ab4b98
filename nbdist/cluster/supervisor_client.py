"""The notebook's handle on the guard process and on the programs it runs."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from nbdist.errors import ClusterError
from nbdist.ipc.private_files import remove_folders
from nbdist.ipc.process_files import describe_exit

__all__ = ["Keeper", "Loss"]


class Loss(NamedTuple):
    """The end of something that the ranks cannot live without."""

    reason: str
    """What has ended and how, in words."""
    is_cause: bool
    """Whether the ranks end because of it. An mpiexec ends by itself, with an exit
    code, when all its ranks have ended."""


class Keeper:
    """Starts a guard, asks it to start programs, and hears when they end.

    Closing the keeper, or the end of this process, makes the guard end everything it
    started and remove `run_dir`. A second `close` is harmless.
    """

    def __init__(self, run_dir: Path, *, together: bool = True) -> None:
        """Start the guard.

        Args:
            run_dir: A folder of its own, removed at the end.
            together: Whether the programs all end when one does.
        """
        self.run_dir = run_dir
        self._together = together
        self._changed = threading.Condition()
        self._pids: dict[str, int] = {}
        self._exit_codes: dict[str, int] = {}
        self._closed = self._ended = False
        self._on_loss: Callable[[Loss], None] | None = None
        self.on_note: Callable[[str], None] = lambda _: None
        """Hears, on a thread, of helper processes that were stopped and go on."""
        self._guard = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "nbdist.cluster.process_supervisor",
                    str(run_dir),
                ),
                *([] if together else ["--apart"]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=Path(__file__).parents[2],  # where `nbdist` can be imported from
        )
        self._reader = threading.Thread(
            target=self._read, name="nbdist-keeper", daemon=True
        )
        self._watch = HelperWatch(lambda note: self.on_note(note))
        self._watch.add("the guard process", self._guard.pid)
        self._reader.start()

    def start(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> None:
        """Start a program; its output goes to `log(name)`.

        Args:
            options: `cwd`, its folder; `memory`, the bytes that it may take.
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
                f"cannot start {name}: the guard process has ended; start anew"
            )

    def stop(self, names: Sequence[str]) -> None:
        """End some programs, and return at once."""
        self._order({"stop": list(names)})

    def _order(self, order: dict[str, Any]) -> bool:
        """Tell the guard; whether it lives to hear it."""
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(json.dumps(order).encode() + b"\n")
            self._guard.stdin.flush()
        except (BrokenPipeError, ValueError):
            return False
        return True

    def wait(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until something holds of the programs, or the guard has ended.

        Args:
            condition: Asked again whenever a program has started or ended; it may ask
                this keeper.

        Returns:
            Whether it holds.
        """
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._ended, timeout_s)
        return condition()

    def log(self, name: str) -> Path:
        """Where a program's standard output and error are kept."""
        return self.run_dir / f"{name}.log"

    def exit_code(self, name: str) -> int | None:
        """The code a program ended with, negative for a signal; None while it runs."""
        with self._changed:
            return self._exit_codes.get(name)

    def pid(self, name: str) -> int | None:
        with self._changed:
            return self._pids.get(name)

    @property
    def alive(self) -> bool:
        return self._guard.poll() is None

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        """Hear, on a thread, that a program or the guard has ended, and how.

        At most once, and not for an end that `close` has brought about.
        """
        with self._changed:
            self._on_loss = callback
            lost = self._exit_codes.copy()
        for name, code in lost.items():
            self._report_loss(name, code)

    def close(self, timeout_s: float = 10.0) -> None:
        """End everything, and return when it has ended."""
        self._closed = True
        self._watch.close()
        with contextlib.suppress(ProcessLookupError):
            self._guard.send_signal(signal.SIGCONT)  # it may have been stopped
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the guard has gone already
            self._guard.stdin.close()
        try:
            self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"the cluster's processes did not end within {timeout_s:.0f} s; "
                f"guard process {self._guard.pid} is still ending them"
            ) from error

    def _read(self) -> None:
        assert self._guard.stdout is not None
        for line in self._guard.stdout:
            record = json.loads(line)
            with self._changed:
                self._changed.notify_all()
                if "started" in record:
                    self._pids[record["started"]] = record["pid"]
                    if self._together:
                        self._watch.add(record["started"], record["pid"])
                    continue
                self._exit_codes[record["exited"]] = record["code"]
            self._report_loss(record["exited"], record["code"])
        self._guard.stdout.close()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if not self._closed:
            self._report_loss("the guard process", self._guard.wait())
            remove_folders(self.run_dir)

    def _report_loss(self, name: str, code: int) -> None:
        with self._changed:
            callback = None if self._closed else self._on_loss
            self._on_loss = None if callback else self._on_loss
        if callback is not None:
            how = describe_exit(code)
            reason = f"{name} has ended with {how}, and all ranks with it"
            callback(Loss(reason, is_cause=name != "mpiexec" or code < 0))


LOOK_S = 0.5


class HelperWatch:
    """Looks twice a second, from a thread of its own.

    A process that has ended is its parent's to report; one that is stopped (SIGSTOP) is
    reported by nobody.

    Args:
        on_note: Hears that a process was stopped and has been continued.
    """

    def __init__(self, on_note: Callable[[str], None]) -> None:
        self._on_note = on_note
        self._helpers: dict[str, psutil.Process] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="nbdist-helper-watch", daemon=True
        )
        self._thread.start()

    def add(self, name: str, pid: int) -> None:
        """Watch a process. One that has ended already is no error."""
        with contextlib.suppress(psutil.NoSuchProcess), self._lock:
            self._helpers[name] = psutil.Process(pid)

    def close(self) -> None:
        """Stop watching. A second close is harmless."""
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
