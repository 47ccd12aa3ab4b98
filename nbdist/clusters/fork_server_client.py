"""Starts the fork server of this process, which serves the clusters of this process."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbdist.config import ForkConfig, read_file
from nbdist.ipc import pidfd
from nbdist.ipc.busy_host import stretched
from nbdist.ipc.fork_messages import (
    SOCKET,
    SWITCHED_OFF,
    receive,
    send,
    socket_address,
)
from nbdist.ipc.process_files import describe_exit

__all__ = ["CannotFork", "await_ready", "close", "hash_seed", "prepare", "serve"]

ANSWER_TIMEOUT_S = 5.0
"""Seconds that a fork server may take to answer after all of its imports."""
IMPORT_TIMEOUT_S = 30.0
"""Seconds that it may take to answer before, when it may be importing a module."""
PROGRAM = Path(__file__).parents[1] / "ipc" / "fork_server.py"
UNRELATED = {
    "CUDA_VISIBLE_DEVICES", "OLDPWD", "PWD", "PYTEST_CURRENT_TEST", "PYTHONHASHSEED",
    "SHLVL", "_",
}  # fmt: skip
"""Variables in which a fork server and its ranks may differ. An import may read any of
the others."""
OF_A_START = ("NBDIST_", "OMPI_", "PRTE_", "PMIX_", "EVENT_")
"""Prefixes of the variables that nbdist and MPI read only when a rank starts."""


class CannotFork(Exception):
    """A cluster's ranks cannot be forked. The message has the reason."""


class _ForkServer:
    """A fork server, and the connection with it."""

    def __init__(
        self,
        environment: Mapping[str, str],
        preload: tuple[str, ...],
        kind: tuple[object, ...],
    ) -> None:
        self.kind = kind
        """The settings that its imports depend on; see `_kind`."""
        self.is_ready = False
        """Whether it serves clusters."""
        self.is_complete = False
        """Whether it has imported everything, so that it answers at once."""
        self._served = 0
        self.why_not = ""
        """Why it serves no further cluster; "" if it does."""
        self.is_unfit = False
        """Whether `why_not` holds for any other fork server of this kind."""
        self._connection, inherited = socket.socketpair()
        with inherited:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), ",".join(preload)],
                stdin=inherited.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    **environment,
                    "PYTHONHASHSEED": hash_seed(),
                    # The import of numpy would start OpenBLAS's pool of threads.
                    "OPENBLAS_NUM_THREADS": "1",
                    # As the ranks have it when they import debugpy.
                    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
                },
                cwd="/",
                start_new_session=True,
            )

    def await_ready(self, timeout_s: float) -> bool:
        """Wait for all of its imports. Returns whether they have succeeded."""
        end = time.monotonic() + timeout_s
        with contextlib.suppress(TimeoutError):
            while not (self.is_complete or self.why_not):
                self._hear(max(0.001, end - time.monotonic()))
        return self.is_complete and not self.why_not

    def offer(self, run_dir: Path, listener: socket.socket) -> bool:
        """Have it serve a cluster. Returns whether it does, or will after its imports.

        A fork server that does not answer in time is killed.
        """
        self._process.send_signal(signal.SIGCONT)  # in case it was stopped
        try:
            self._hear(timeout_s=0.0)
            was_ready, served = self.is_ready, self._served
            if not self.why_not:
                send(self._connection, {"run_dir": str(run_dir)}, [listener.fileno()])
            limit = ANSWER_TIMEOUT_S if self.is_complete else IMPORT_TIMEOUT_S
            end = time.monotonic() + stretched(limit)
            while was_ready and self._served == served and not self.why_not:
                self._hear(max(0.001, end - time.monotonic()))
        except OSError as error:
            self.why_not = f"the fork server does not answer: {error}"
            self._process.kill()  # it must not serve this cluster later
        return not self.why_not

    def _hear(self, timeout_s: float) -> None:
        """Read its messages. Waits at most `timeout_s` for the first of them."""
        self._connection.settimeout(timeout_s)
        with contextlib.suppress(BlockingIOError):
            while not self.why_not:
                self._take(self._next_message())
                self._connection.settimeout(0.0)

    def _next_message(self) -> dict[str, Any]:
        try:
            received = receive(self._connection)
        except ConnectionResetError:  # it ended before it read all; its messages follow
            received = receive(self._connection)
        return received[0] if received else {"ended": True}

    def _take(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.is_ready = True
        elif "complete" in message:
            self.is_complete = True
        elif "serving" in message:
            self._served += 1
        elif "stale" in message:
            self.why_not = f"{message['stale']} has changed"
        elif "unfit" in message:
            self.why_not, self.is_unfit = message["unfit"], True
        elif "ended" in message:
            code = self._process.wait()
            self.why_not = f"the fork server has ended with {describe_exit(code)}"
            # An import that ends the process does so again. No import sends SIGKILL.
            self.is_unfit = not self.is_ready and code != -signal.SIGKILL

    @property
    def is_spent(self) -> bool:
        """Whether it serves no further cluster, and another fork server may."""
        return bool(self.why_not) and not self.is_unfit

    @property
    def pid(self) -> int:
        return self._process.pid

    def retire(self) -> subprocess.Popen[bytes]:
        """Have it end when its last rank host has ended."""
        self._connection.close()
        if not self.is_ready:
            self._process.kill()  # it reads the connection only after its imports
        return self._process


_server: _ForkServer | None = None
_retired: set[subprocess.Popen[bytes]] = set()
"""Fork servers that end with the clusters that they serve."""
_lock = threading.Lock()
_seed = str(secrets.randbelow(2**32 - 1) + 1)


def hash_seed() -> str:
    """The seed of `hash` for all ranks of this process's clusters."""
    chosen = os.environ.get("PYTHONHASHSEED", "random")
    return _seed if chosen in ("", "random") else chosen


def prepare(environment: Mapping[str, str]) -> str:
    """Start the fork server in the background, unless one with these settings runs.

    Args:
        environment: The environment of the ranks, with the launcher's variables.

    Returns:
        Why there is no fork server; "" if there is one.

    Raises:
        UsageError: nbdist.toml or NBDIST_PRELOAD is invalid.
    """
    config = ForkConfig.read(read_file())
    with _lock:
        return _prepare(environment, config)


def await_ready(timeout_s: float) -> bool:
    """Wait for the fork server's imports. Returns whether they have succeeded."""
    with _lock:
        return _server is not None and _server.await_ready(timeout_s)


def _prepare(
    environment: Mapping[str, str], config: ForkConfig, run_dir: Path | None = None
) -> str:
    global _server
    if config.preload is None:
        return SWITCHED_OFF
    if sys.platform != "linux":
        return f"{sys.platform} has no safe fork"
    if not pidfd.can_open():  # the fork server hears of ends by them
        return "this kernel or container refuses pidfd_open"
    kind = _kind(environment, config.preload, run_dir)
    if _server is not None and (_server.kind != kind or _server.is_spent):
        _replace(_server)
    if _server is None:
        _server = _ForkServer(environment, config.preload, kind)
    return _server.why_not


def _replace(server: _ForkServer) -> None:
    """Retire a fork server, so that the next start begins another."""
    process = _retire(server)
    # It stays a zombie until someone waits for it.
    threading.Thread(
        target=_collect, args=[process], name="nbdist-fork-server-exit", daemon=True
    ).start()


def _retire(server: _ForkServer) -> subprocess.Popen[bytes]:
    global _server
    process = server.retire()
    _retired.add(process)
    _server = None
    return process


def _collect(process: subprocess.Popen[bytes]) -> None:
    """Wait until a retired fork server has ended."""
    process.wait()
    _retired.discard(process)


def serve(run_dir: Path, environment: Mapping[str, str], config: ForkConfig) -> int:
    """Have the fork server serve a cluster, on a socket in the cluster's run folder.

    Args:
        run_dir: The cluster's run folder.
        environment: As for `prepare`.
        config: The options of the fork server.

    Returns:
        The pid of the fork server.

    Raises:
        CannotFork: There is no fork server for this cluster.
    """
    with _lock, socket.socket(socket.AF_UNIX) as listener:
        if why_not := _prepare(environment, config, run_dir):
            raise CannotFork(why_not)
        try:
            with socket_address(run_dir / SOCKET) as address:
                listener.bind(address)
            listener.listen(socket.SOMAXCONN)
        except OSError as error:  # the file system has no sockets
            raise CannotFork(f"no socket in {run_dir}: {error}") from error
        for _ in range(2):
            if why_not := _prepare(environment, config, run_dir):
                break
            assert _server is not None
            if _server.offer(run_dir, listener):
                return _server.pid
            why_not = _server.why_not
        (run_dir / SOCKET).unlink()
        raise CannotFork(why_not)


def close() -> None:
    """End the fork server. Clusters whose ranks it has forked are not affected.

    A later start begins another fork server. A second call has no effect.
    """
    with _lock:
        if _server is not None:
            _retire(_server)  # no thread can begin when the interpreter ends
        for process in list(_retired):
            process.kill()
            process.wait()


def _forget() -> None:
    """Forget the fork server in a forked child. It belongs to the parent."""
    global _server, _lock
    _server, _lock = None, threading.Lock()
    _retired.clear()


def _kind(
    environment: Mapping[str, str], preload: tuple[str, ...], run_dir: Path | None
) -> tuple[object, ...]:
    """The settings that a fork server's imports depend on: equal ones can share it.

    Args:
        run_dir: The cluster's run folder; None before there is one. Its path is removed
            from the variables, because each cluster has another. The targets of its
            links count instead.
    """
    here = "" if run_dir is None else str(run_dir)
    links = [] if run_dir is None else sorted(map(os.path.realpath, _links(run_dir)))
    variables = {
        name: value.replace(here, "") if here else value
        for name, value in environment.items()
        if name not in UNRELATED and not name.startswith(OF_A_START)
    }
    named = tuple(sorted(variables.items()))
    return sys.executable, hash_seed(), preload, named, tuple(links)


def _links(run_dir: Path) -> list[Path]:
    """A launcher's links to the MPI library."""
    return [path for path in run_dir.glob("*/*") if path.is_symlink()]


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
