"""The process that imports what every rank needs, once, and forks the ranks.

`python fork_server.py` is started by the notebook's kernel, which holds the other end
of its standard input, a Unix socket. There are three kinds of process in one program:

- The *fork server* imports torch, mpi4py, IPython and the engine. For each cluster it
  gets a listening socket from the kernel, and forks a *rank host*. It ends with the
  kernel.
- A cluster's rank host forks a rank for each rank parent that asks, is the parent of
  these ranks, and tells each rank parent the exit code. Its first client is the
  cluster's process supervisor. When that connection closes, or a rank parent's, the
  rank host ends the ranks concerned. A rank dies with its rank host.
- A *rank* takes over the environment, the working folder, the descriptors and the like
  of the rank parent that asked, and goes on as `python -m nbdist.engine`.

Neither server runs a thread: a process that forks while a thread of it holds a lock
gives the child a lock that nobody releases. Where an import has started one, the fork
server says so and ends, and the ranks are started without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import importlib.util
import os
import runpy
import selectors
import signal
import site
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder that nbdist can be imported from."""

if __name__ == "__main__":
    # Not this file's folder, whose modules would stand before those of Python.
    sys.path[0:1] = []
    sys.path.append(str(ROOT))

from nbdist.ipc.fork_messages import (  # noqa: E402
    MAX_DESCRIPTORS,
    RANK_HOST,
    Request,
    peer_user,
    receive,
    send,
)
from nbdist.ipc.prctl import (  # noqa: E402
    adopt_orphans,
    die_with_parent,
    name_process,
)

__all__: list[str] = []

PRELOADED = (
    "numpy",
    "torch",
    "torch.distributed",
    "IPython",
    "ipykernel.ipkernel",
    "ipykernel.zmqshell",
    "ipyparallel.engine.app",
    "nbdist.engine.bootstrap",
    "nbdist.engine.kernel",
)
TEXT_BARS = "nbdist.engine.text_bars"
REQUEST_TIMEOUT_S = 10.0
"""How long a client that has connected may take to send its request."""
SUPERVISOR_TIMEOUT_S = 60.0
"""How long a rank host waits for the cluster's process supervisor."""
LOG = f"{RANK_HOST}.log"


def main() -> None:
    """Serve the kernel at descriptor 0; go on as a rank in each process forked."""
    control = _take_control()
    try:
        _preload(name for name in sys.argv[1].split(",") if name)
    except BaseException as error:  # noqa: BLE001 - told to the kernel
        why = str(error)
        if not isinstance(error, _CannotFork):
            why = traceback.format_exception_only(type(error), error)[-1].strip()
        with contextlib.suppress(OSError):  # the kernel has ended
            send(control, {"unfit": why})
        return
    try:
        send(control, {"ready": os.getpid()})
    except OSError:
        return  # the kernel has ended
    stamps = _Stamps.taken()
    listener = _Server(control, stamps).run()
    if listener is None:
        os._exit(0)
    rank = _RankHost(listener, stamps).run()
    if rank is None:
        os._exit(0)
    _become_rank(*rank)


def _take_control() -> socket.socket:
    """The connection with the kernel, moved away from descriptor 0."""
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    return control


# -- the imports -------------------------------------------------------------------


class _CannotFork(Exception):
    pass


def _preload(names: Iterable[str]) -> None:
    """Import what ranks need; `names` are the user's.

    Raises:
        _CannotFork: This process can no longer be forked.
        Exception: An import has failed.
    """
    _refuse_customization()
    import mpi4py

    # MPI begins in the rank: its identity is in the rank's environment.
    mpi4py.rc(initialize=False, finalize=True)
    for name in PRELOADED:
        importlib.import_module(name)
    importlib.import_module(TEXT_BARS).install()  # the user's may import tqdm.auto
    for name in names:
        importlib.import_module(name)
    mpi4py.rc(initialize=True, finalize=None)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise _CannotFork(f"an import has started {threads - 1} threads")
    import torch

    if torch.cuda.is_initialized():
        raise _CannotFork("an import has initialised CUDA")
    gc.collect()
    gc.freeze()  # the collector would write to pages that all ranks share


def _refuse_customization() -> None:
    """Fork nothing where each process begins with a module of the user's own.

    What it does may depend on the process, such as on a rank's number.

    Raises:
        _CannotFork: There is one on PYTHONPATH, or in the user's site-packages.
    """
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = {os.path.realpath(folder) for folder in filter(None, folders)}
    own.add(os.path.realpath(site.getusersitepackages()))
    for name in ("sitecustomize", "usercustomize"):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is not None and os.path.realpath(os.path.dirname(path)) in own:
            raise _CannotFork(f"{path} is run by each process as it begins")


@dataclass(frozen=True)
class _Stamps:
    """The files that imports have read, as they were."""

    files: dict[str, tuple[int, int, int] | None]

    @classmethod
    def taken(cls) -> _Stamps:
        files = [getattr(module, "__file__", None) for module in sys.modules.values()]
        chosen = {*filter(None, files), *_site_files()}
        return cls({path: _stamp(path) for path in chosen})

    def changed(self) -> str | None:
        """A file that is another one now."""
        for path, stamp in self.files.items():
            if _stamp(path) != stamp:
                return path
        new = set(_site_files()) - self.files.keys()
        return min(new, default=None)


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _site_files() -> Iterator[str]:
    """What Python's `site` reads or runs when a process begins, there or not."""
    for folder in sys.path:
        for name in ("sitecustomize.py", "usercustomize.py"):
            yield os.path.join(folder, name)
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    for folder in folders:
        with contextlib.suppress(OSError):  # there is none
            for name in os.listdir(folder):
                if name.endswith(".pth"):
                    yield os.path.join(folder, name)


class _Shadows:
    """Which folders of a user's path hold modules of a name that is imported here."""

    def __init__(self) -> None:
        self._known = {os.path.realpath(folder) for folder in sys.path}
        self._names = {
            name.partition(".")[0]
            for name, module in sys.modules.items()
            if getattr(module, "__file__", None)
        } - {"nbdist"}  # a rank takes it from the same folder in any case

    def found(self, request: Request) -> str | None:
        """A module on a rank's path that may stand before one imported here."""
        here = request.environment["NBDIST_WORK_DIR"]
        for folder in request.environment["NBDIST_PATH"].split(os.pathsep):
            path = os.path.realpath(os.path.join(here, folder))
            if path in self._known:
                continue
            with contextlib.suppress(OSError):  # no such folder
                for entry in os.listdir(path):
                    name, _, suffix = entry.partition(".")
                    if name in self._names and _is_module(path, entry, suffix):
                        return os.path.join(path, entry)
        return None


def _is_module(folder: str, entry: str, suffix: str) -> bool:
    """Whether an entry of a folder is a module; a folder without code comes last."""
    if suffix:
        return suffix == "py" or suffix.endswith("so")
    return os.path.exists(os.path.join(folder, entry, "__init__.py"))


# -- the servers -------------------------------------------------------------------


_Rank = tuple[Request, list[int]]
"""What a rank was asked for, and its descriptors."""


class _Loop:
    """A process that waits for connections and for the ends of its children."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup_writer, False)
        os.set_blocking(self._wakeup, False)
        self.selector.register(self._wakeup, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def events(self, timeout_s: float | None = None) -> list[object]:
        """Wait; the file objects that can be read."""
        ready = [key.fileobj for key, _ in self.selector.select(timeout_s)]
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 4096)
        return [each for each in ready if each != self._wakeup]

    def fork(self) -> int:
        """Fork; in the child nothing of this loop is left, and signals are blocked."""
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.selector.close()
            os.close(self._wakeup)
            os.close(self._wakeup_writer)
        else:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return child


def _ended_children() -> Iterator[tuple[int, int]]:
    """(pid, exit code) of each child that has ended; the codes are negative signals."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


class _Server(_Loop):
    """The fork server: forks a rank host for each cluster."""

    def __init__(self, control: socket.socket, stamps: _Stamps) -> None:
        super().__init__()
        adopt_orphans()  # of a rank host that is killed
        self._control = control
        self._stamps = stamps
        self._hosts: set[int] = set()
        self._is_retired = False
        self._kernel = os.pidfd_open(os.getppid())
        self.selector.register(control, selectors.EVENT_READ)
        # A process that the notebook forked may hold our input open.
        self.selector.register(self._kernel, selectors.EVENT_READ)

    def run(self) -> socket.socket | None:
        """The socket of a rank host, in that process; None when it is to end.

        It ends with the kernel; where the kernel has closed the connection alone, with
        the last rank host, whose exit it has to collect.
        """
        while not self._is_retired or self._hosts:
            for ready in self.events():
                if ready == self._kernel:
                    return None
                received = receive(self._control, descriptors=1)
                if received is None:
                    self.selector.unregister(self._control)
                    self._is_retired = True
                    continue
                listener = self._begin(received[0]["run_dir"], received[1][0])
                if listener is not None:
                    return listener
            self._reap()
        return None

    def _begin(self, run_dir: str, descriptor: int) -> socket.socket | None:
        listener = socket.socket(fileno=descriptor)
        changed = self._stamps.changed()
        if changed is not None:
            listener.close()
            send(self._control, {"stale": changed})
            return None
        child = self.fork()
        if child == 0:
            self._control.close()
            os.close(self._kernel)
            _log_to(Path(run_dir) / LOG)
            name_process(f"nbdist rank host of {run_dir}")
            return listener
        listener.close()
        self._hosts.add(child)
        send(self._control, {"serving": child})
        return None

    def _reap(self) -> None:
        ended = {pid for pid, _ in _ended_children()}
        self._hosts -= ended
        if ended:
            # Orphans of a rank host that was killed. Each that ends may leave others.
            _kill_below(apart_from=self._hosts)


class _RankHost(_Loop):
    """Forks the ranks of one cluster, and reports how they end.

    Args:
        listener: Where the cluster's process supervisor connects first, and the rank
            parents then.
    """

    def __init__(self, listener: socket.socket, stamps: _Stamps) -> None:
        super().__init__()
        adopt_orphans()
        self._stamps = stamps
        signal.signal(signal.SIGTERM, lambda *_: self._begin_ending())
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._shadows = _Shadows()
        self._is_killing = False
        self._listener: socket.socket | None = listener
        self._supervisor: socket.socket | None = None
        self._ranks: dict[int, socket.socket] = {}
        """The connection with its rank parent, by a rank's pid."""
        self.selector.register(listener, selectors.EVENT_READ)

    def run(self) -> _Rank | None:
        """What a rank was asked for, in that rank; None when all ranks have ended."""
        while self._listener is not None or _has_children():
            is_attended = self._supervisor is not None
            events = self.events(None if is_attended else SUPERVISOR_TIMEOUT_S)
            if not (is_attended or events):
                return None
            for ready in events:
                if ready is self._listener:
                    rank = self._accept()
                    if rank is not None:
                        return rank
                elif ready is self._supervisor and self._supervisor is not None:
                    self.selector.unregister(self._supervisor)
                    self._begin_ending()
                    self._is_killing = True
                else:
                    self._end_rank_of(ready)
            self._reap()
            if self._is_killing:
                _kill_below()
        return None

    def _begin_ending(self) -> None:
        """Take no more requests; end as soon as there is no process below."""
        if self._listener is not None:
            self.selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self) -> _Rank | None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        if peer_user(connection) != os.geteuid():
            connection.close()
            return None
        if self._supervisor is None:
            self._supervisor = connection
            self.selector.register(connection, selectors.EVENT_READ)
            with contextlib.suppress(OSError):  # it has ended: that is read next
                send(connection, {"pid": os.getpid()})
            return None
        connection.settimeout(REQUEST_TIMEOUT_S)
        try:
            received = receive(connection, descriptors=MAX_DESCRIPTORS)
            if received is None or _is_closed(connection):
                connection.close()
                return None
            return self._fork_rank(connection, *received)
        except OSError:
            connection.close()
            return None

    def _fork_rank(
        self, connection: socket.socket, message: dict[str, object], received: list[int]
    ) -> _Rank | None:
        request = Request.of_message(message)
        if (refusal := self._refusal(request)) is not None:
            send(connection, {"refused": refusal})
            connection.close()
            for descriptor in received:
                os.close(descriptor)
            return None
        host = os.getpid()
        child = self.fork()
        if child == 0:
            die_with_parent()
            if os.getppid() != host:
                os._exit(1)
            connection.close()
            self._let_go()
            return request, received
        for descriptor in received:
            os.close(descriptor)
        self._ranks[child] = connection
        self.selector.register(connection, selectors.EVENT_READ)
        handle = os.pidfd_open(child)
        with contextlib.suppress(
            OSError
        ):  # the rank parent has ended: that is read next
            send(connection, {"pid": child}, [handle])
        os.close(handle)
        return None

    def _refusal(self, request: Request) -> str | None:
        """Why a forked rank would differ from one that is started alone."""
        if (changed := self._stamps.changed()) is not None:
            return f"{changed} has changed since the fork server read it"
        if (found := self._shadows.found(request)) is not None:
            return f"{found} may be meant instead of the fork server's module"
        return None

    def _let_go(self) -> None:
        """In a rank: close what is the rank host's."""
        for connection in (self._listener, self._supervisor, *self._ranks.values()):
            if connection is not None:
                connection.close()

    def _end_rank_of(self, connection: object) -> None:
        """A rank parent has ended: its rank ends too."""
        for pid, other in self._ranks.items():
            if other is connection:
                self.selector.unregister(other)
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for pid, code in _ended_children():
            connection = self._ranks.pop(pid, None)
            if connection is not None:
                with contextlib.suppress(KeyError):
                    self.selector.unregister(connection)
                with contextlib.suppress(OSError):  # the rank parent has ended
                    send(connection, {"code": code})
                connection.close()


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end has given up, which sends one request alone."""
    limit = connection.gettimeout()
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(limit)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _kill_below(apart_from: Iterable[int] = ()) -> None:
    """Kill all processes below this one, apart from some children and their own."""
    import psutil

    kept = set(apart_from)
    for child in psutil.Process().children():
        if child.pid not in kept:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [*child.children(recursive=True), child]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()


def _log_to(path: Path) -> None:
    """Send descriptors 1 and 2 to a file."""
    with contextlib.suppress(OSError):  # no room, or the cluster has ended
        log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)


# -- a rank ------------------------------------------------------------------------


def _become_rank(request: Request, descriptors: list[int]) -> None:
    """Go on as the program that a rank parent would have started."""
    _renumber(dict(zip(request.descriptors, descriptors, strict=True)))
    os.setpgid(0, 0)
    request.apply()
    _seed()
    importlib.invalidate_caches()
    sys.path_importer_cache.clear()
    sys.argv = ["-m", *request.arguments]
    sys.orig_argv = [sys.executable, "-m", "nbdist.engine", *request.arguments]
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    runpy.run_module("nbdist.engine", run_name="__main__", alter_sys=True)


def _renumber(descriptors: Mapping[int, int]) -> None:
    """Give open descriptors other numbers, and close all others.

    Args:
        descriptors: The open descriptor, by its new number.
    """
    above = 1 + max(*descriptors, *descriptors.values())
    # First beyond all numbers that are wanted, where none is in the way of another.
    kept = {
        number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, above)
        for number, descriptor in descriptors.items()
    }
    for number, descriptor in kept.items():
        os.dup2(descriptor, number)
    begin = 0
    for number in sorted(descriptors):
        if begin < number:  # closerange(0, 0) closes all
            os.closerange(begin, number)
        begin = number + 1
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))


def _seed() -> None:
    """Give this process random states of its own; Python's `random` does it alone."""
    import multiprocessing

    import numpy as np
    import torch

    np.random.seed()
    torch.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)


if __name__ == "__main__":
    main()
