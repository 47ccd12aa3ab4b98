"""Imports the modules that every rank needs once, and forks the ranks.

The notebook's kernel starts `python fork_server.py` with a Unix socket as its standard
input, and keeps the other end. The program runs as three kinds of process:

- The *fork server* imports torch, mpi4py, IPython and the engine. For each cluster the
  kernel sends it a listening socket, and it forks a *rank host*. While it waits, it
  imports what ranks need later. It ends with the kernel.
- A rank host forks a rank for each rank parent of its cluster that requests one. It is
  the parent of these ranks, and sends each rank parent the exit code of its rank. Its
  first client is the cluster's process supervisor, for which it forks the controller in
  the same way. When the supervisor's first connection closes, the rank host kills all
  that it has forked; when another connection closes, the process that was requested on
  it. A forked process dies with its rank host.
- A *rank* takes the environment, working folder, limits and descriptors of its rank
  parent, and runs `python -m nbdist.engine`.

The fork server and the rank host run no second thread: a lock that such a thread holds
during a fork stays locked in the child. If an import has started a thread, the fork
server reports it and ends, and the rank parents start their ranks themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import gc
import importlib
import importlib.util
import os
import resource
import runpy
import selectors
import signal
import site
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""The folder that nbdist can be imported from."""

if __name__ == "__main__":
    # This file's folder would hide modules of the standard library.
    sys.path[0:1] = []
    sys.path.append(str(ROOT))

from nbdist.config import OutputConfig  # noqa: E402
from nbdist.ipc import pidfd  # noqa: E402
from nbdist.ipc.device_assignment import DeviceAssignment  # noqa: E402
from nbdist.ipc.file_pages import release_file_pages  # noqa: E402
from nbdist.ipc.fork_messages import (  # noqa: E402
    ENGINE,
    GATE,
    MAX_DESCRIPTORS,
    RANK_HOST,
    peer_pid,
    peer_user,
    receive,
    send,
)
from nbdist.ipc.host_sockets import HOST  # noqa: E402
from nbdist.ipc.launch_environment import launched_size  # noqa: E402
from nbdist.ipc.listening import Acceptor  # noqa: E402
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
    "IPython.core.completerlib",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "ipykernel.ipkernel",
    "ipykernel.zmqshell",
    "ipyparallel.controller.app",
    "ipyparallel.engine.app",
    "nbdist.collectives._native",
    "nbdist.engine.bootstrap",
    "nbdist.engine.control_handlers",
    "nbdist.engine.kernel",
    "tornado.platform.asyncio",
)
"""What a rank imports by the end of its first cell, and what the controller imports."""
LATER = ("nbdist.elastic", "sympy", "torch._dynamo")
"""What a rank imports with its first optimizer and elastic run. The fork server imports
them one by one while it has no request, and serves from the start without them. A rank
host that was forked before does the same, for the ranks that join or are replaced."""
LATER_AFTER_S = 3.0
"""Seconds without a request after which a rank host imports one of them."""
DEBUGGER = "nbdist.engine.ipykernel_debugger"
TEXT_BARS = "nbdist.engine.text_bars"
REGISTRATION = "nbdist.collectives.torch_backend.registration"
REQUEST_TIMEOUT_S = 10.0
"""Seconds that a client may take to send its request after it has connected."""
SUPERVISOR_TIMEOUT_S = 60.0
"""Seconds that a rank host waits for the cluster's process supervisor to connect."""
LOG = f"{RANK_HOST}.log"
ENDING_TIMEOUT_S = 1.0
"""The most seconds between the end of a supervisor's connection and its own end."""
CHECK_S = 1.0
"""Seconds for which a rank host does not check the imported files again."""


def main() -> None:
    """Serve the kernel at descriptor 0. In a forked rank, run the engine."""
    control = _take_control()
    before = os.environ.copy()
    try:
        _preload(name for name in sys.argv[1].split(",") if name)
    except BaseException as error:  # noqa: BLE001 - any error is sent to the kernel
        _report(control, error)
        return
    try:
        send(control, {"ready": os.getpid()})
    except OSError:
        return  # the kernel has ended
    server = _Server(control)
    listener = server.run()
    if listener is None:
        os._exit(0)
    imported = server.stamps, server.shadows, server.later
    requested = _RankHost(listener, *imported).run()
    if requested is None:
        os._exit(0)
    added = {k: v for k, v in os.environ.items() if k not in before}
    _become(*requested, added)


def _take_control() -> socket.socket:
    """The connection with the kernel. Descriptor 0 becomes /dev/null."""
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    return control


# -- the imports -------------------------------------------------------------------


class _CannotFork(Exception):
    pass


def _preload(names: Iterable[str]) -> None:
    """Import the modules that ranks need.

    Args:
        names: Further modules, which the user has chosen.

    Raises:
        _CannotFork: This process can no longer be forked.
        Exception: An import has failed.
    """
    _refuse_customization()
    import mpi4py

    # MPI is initialised in the rank, whose environment has its identity.
    mpi4py.rc(initialize=False, finalize=True)
    importlib.import_module(DEBUGGER).leave_out()
    for name in PRELOADED:
        # If one is absent, like the compiled part, a rank does without it or says so.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    importlib.import_module(REGISTRATION).define()
    if not OutputConfig.from_environment().widgets:  # `names` may import tqdm.auto
        importlib.import_module(TEXT_BARS).install()
    for name in names:
        importlib.import_module(name)
    mpi4py.rc(initialize=True, finalize=None)
    _check_and_freeze()


def _check_and_freeze() -> None:
    """Prepare to fork, after imports.

    Raises:
        _CannotFork: This process can no longer be forked.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise _CannotFork(f"an import has started {threads - 1} threads")
    import torch

    if torch.cuda.is_initialized():
        raise _CannotFork("an import has initialised CUDA")
    _forget_folders()
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.clear_lru_cache()  # as torch.distributed does when a rank initialises it
    gc.collect()
    gc.freeze()  # the collector would write to pages that all ranks share
    release_file_pages()  # most of torch's are read by its import alone


def _forget_folders() -> None:
    """Forget what the folders of `sys.path` contain.

    A forked process does so too. If there is much to forget, it writes to as many pages
    that it would otherwise share.
    """
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()


@contextlib.contextmanager
def _without_compile_cache() -> Iterator[None]:
    """Remove the empty folder and the variable that an import of torch._dynamo makes.

    torch makes both again when it compiles.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    is_chosen = name in os.environ
    yield
    if not is_chosen and name in os.environ:
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(os.environ.pop(name))


def _report(control: socket.socket, error: BaseException) -> None:
    """Tell the kernel why this process cannot serve."""
    why = str(error)
    if not isinstance(error, _CannotFork):
        why = traceback.format_exception_only(type(error), error)[-1].strip()
    with contextlib.suppress(OSError):  # the kernel has ended
        send(control, {"unfit": why})


def _refuse_customization() -> None:
    """Refuse a `sitecustomize` or `usercustomize` module of the user's own.

    Its effect may depend on the process, for instance on the number of a rank.

    Raises:
        _CannotFork: There is such a module on PYTHONPATH, or in the user's
            site-packages.
    """
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = {os.path.realpath(folder) for folder in filter(None, folders)}
    own.add(os.path.realpath(site.getusersitepackages()))
    for name in ("sitecustomize", "usercustomize"):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is not None and os.path.realpath(os.path.dirname(path)) in own:
            raise _CannotFork(f"{path} runs at the start of each process")


@dataclass(frozen=True)
class _Stamps:
    """The modification time, size and inode of the files that imports have read."""

    files: dict[str, tuple[int, int, int] | None]

    @classmethod
    def taken(cls) -> _Stamps:
        files = [getattr(module, "__file__", None) for module in sys.modules.values()]
        chosen = {*filter(None, files), *_site_files()}
        return cls({path: _stamp(path) for path in chosen})

    def extended(self) -> _Stamps:
        """These, and those of the files that have been read since then."""
        return _Stamps(_Stamps.taken().files | self.files)

    def changed(self) -> str | None:
        """The path of a file that has changed since then; None if none has."""
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
    """Files that Python's `site` reads or runs at the start of a process.

    The `sitecustomize.py` and `usercustomize.py` need not exist.
    """
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
    """Finds modules on a rank's path that would hide a module imported here.

    A copy of the imported module's file hides nothing. torch 2.7, for example, writes
    such a module to a temporary folder of each process, and adds the folder to the
    path.
    """

    def __init__(self) -> None:
        self._known = {os.path.realpath(folder) for folder in sys.path}
        names = {
            name.partition(".")[0]
            for name, module in sys.modules.items()
            if getattr(module, "__file__", None)
        } - {"nbdist"}  # a rank imports it from the same folder in any case
        self._files = {
            name: getattr(sys.modules.get(name), "__file__", None) for name in names
        }
        """The file of each module here by its name; None for a namespace package."""

    def found(self, request: Request) -> str | None:
        """The path of such a module on the rank's path; None if there is none."""
        here = request.environment["NBDIST_WORK_DIR"]
        for folder in request.environment["NBDIST_PATH"].split(os.pathsep):
            path = os.path.realpath(os.path.join(here, folder))
            if path in self._known:
                continue
            with contextlib.suppress(OSError):  # no such folder
                for entry in os.listdir(path):
                    name, _, suffix = entry.partition(".")
                    if name in self._files and _is_module(path, entry, suffix):
                        found = os.path.join(path, entry)
                        if not _is_copy(found, self._files[name]):
                            return found
        return None


def _is_module(folder: str, entry: str, suffix: str) -> bool:
    """Whether an entry of a folder is a module or package.

    A folder without `__init__.py` is a namespace package, which hides no module.
    """
    if suffix:
        return suffix == "py" or suffix.endswith("so")
    return os.path.exists(os.path.join(folder, entry, "__init__.py"))


def _is_copy(entry: str, imported: str | None) -> bool:
    """Whether an entry of a folder is a file with the content of an imported one."""
    if imported is None or not os.path.isfile(entry):
        return False
    return filecmp.cmp(entry, imported, shallow=False)


# -- the servers -------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """The state that a forked process takes over from the process that requests it.

    `fork_messages.request` makes it. The descriptors are sent with it.
    """

    arguments: list[str]
    module: str
    """The module that the forked process runs, as `python -m` does."""
    environment: dict[str, str]
    folder: str
    umask: int
    limits: dict[str, tuple[int, int]]
    """(soft, hard) by the name of `resource`'s constant."""
    cores: list[int]
    """The CPU affinity mask; empty if the system has none."""
    descriptors: list[int]
    """The numbers in the forked process of the descriptors sent with the message."""

    def apply(self) -> None:
        """Set this process's state to this one, except the arguments."""
        os.environ.clear()
        for name, value in self.environment.items():  # `update` asks many classes
            os.environ[name] = value
        os.umask(self.umask)
        for name, limit in self.limits.items():
            # A hard limit below the wanted one cannot be raised.
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(getattr(resource, name), (limit[0], limit[1]))
        if self.cores:
            with contextlib.suppress(OSError):  # cores that were taken away meanwhile
                os.sched_setaffinity(0, self.cores)
        os.chdir(self.folder)


_Requested = tuple[Request, list[int]]
"""The request for a process, and the descriptors of the process."""


class _Loop:
    """The event loop of a process that serves connections and has children."""

    def __init__(
        self, stamps: _Stamps, shadows: _Shadows, later: Iterable[str]
    ) -> None:
        self.stamps = stamps
        self.shadows = shadows
        self.later = list(later)
        """What this process has yet to import."""
        self.selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup_writer, False)
        os.set_blocking(self._wakeup, False)
        self.selector.register(self._wakeup, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def events(self, timeout_s: float | None = None) -> list[object]:
        """Wait for an event. Returns the file objects that can be read."""
        ready = [key.fileobj for key, _ in self.selector.select(timeout_s)]
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 4096)
        return [each for each in ready if each != self._wakeup]

    def import_next(self) -> None:
        """Import the next of `later`.

        Raises:
            _CannotFork: This process can no longer be forked.
        """
        # If it fails, it does so again in a rank that needs it.
        with _without_compile_cache(), contextlib.suppress(Exception):
            importlib.import_module(self.later.pop(0))
        _check_and_freeze()
        self.stamps = self.stamps.extended()
        self.shadows = _Shadows()

    def fork(self) -> int:
        """Fork. In the child, this loop is closed and all signals are blocked."""
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
    """(pid, exit code) of each child that has ended. The code is -N for signal N."""
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

    def __init__(self, control: socket.socket) -> None:
        super().__init__(_Stamps.taken(), _Shadows(), LATER)
        adopt_orphans()  # of a rank host that is killed
        self._control = control
        self._hosts: set[int] = set()
        self._is_retired = False
        self._kernel = os.pidfd_open(os.getppid())
        self.selector.register(control, selectors.EVENT_READ)
        # A process that the kernel has forked may keep the connection open.
        self.selector.register(self._kernel, selectors.EVENT_READ)

    def run(self) -> socket.socket | None:
        """Serve until the kernel ends. Returns a socket in a forked rank host only.

        If the kernel closes the connection but still runs, this serves until the last
        rank host has ended, because it must collect the rank hosts' exits.

        Returns:
            The listening socket of the rank host that this process is; None in the fork
            server.
        """
        while not self._is_retired or self._hosts:
            events = self.events(0.0 if self.later else None)
            if self.later and not events:
                self._import_next()
            for ready in events:
                if ready == self._kernel:
                    return None
                received = receive(self._control, descriptors=1)
                if received is None:
                    self._retire()
                    continue
                listener = self._begin(received[0]["run_dir"], received[1][0])
                if listener is not None:
                    return listener
            self._reap()
        return None

    def _retire(self) -> None:
        self.selector.unregister(self._control)
        self._is_retired, self.later = True, []

    def _import_next(self) -> None:
        try:
            self.import_next()
        except _CannotFork as error:
            _report(self._control, error)
            self._retire()
            return
        if not self.later:
            with contextlib.suppress(OSError):  # the kernel has ended
                send(self._control, {"complete": os.getpid()})

    def _begin(self, run_dir: str, descriptor: int) -> socket.socket | None:
        listener = socket.socket(fileno=descriptor)
        changed = self.stamps.changed()
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
            # The orphans of a rank host that was killed. Each may leave orphans again.
            _kill_below(apart_from=self._hosts)


class _Gate:
    """Holds the ranks of a start before MPI_Init, until all of them are forked.

    A rank that waits in MPI_Init for others polls, and takes the cores from them. Each
    rank waits until the pipe is closed. A rank that joins later does not.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._ranks = 0

    def count(self, request: Request) -> None:
        """Count a rank that was forked or refused. The last one opens the gate."""
        if _starts_with_others(request):
            self._ranks += 1
            if self._ranks == _ranks_here(request.environment):
                os.close(self._writer)

    def added_to(self, request: Request, descriptors: list[int]) -> _Requested:
        """Give a request the descriptor that its rank waits for."""
        if not _starts_with_others(request):
            return request, descriptors
        number = max(*request.descriptors, *_of_libffi()) + 1
        return replace(
            request,
            environment={**request.environment, GATE: str(number)},
            descriptors=[*request.descriptors, number],
        ), [*descriptors, self._reader]


def _starts_with_others(request: Request) -> bool:
    """Whether a rank is one of a start, and the launcher tells their number."""
    is_first = request.module == ENGINE and not request.arguments
    return is_first and launched_size(request.environment) is not None


def _ranks_here(environment: Mapping[str, str]) -> int | None:
    """The number of ranks of a start on this host; None if it is not known."""
    host = environment.get(HOST)
    if host is None:
        return launched_size(environment)
    assignments = DeviceAssignment.read_all(Path(environment["NBDIST_RUN_DIR"]))
    return sum(each.host == host for each in assignments)


class _RankHost(_Loop):
    """Forks the ranks and the controller of one cluster, and reports how they end.

    Args:
        listener: The socket to which the cluster's process supervisor connects first,
            and then the rank parents.
        stamps: Those of the imports so far.
        shadows: Finds what would hide them.
        later: What to import while there is no request.
    """

    def __init__(
        self,
        listener: socket.socket,
        stamps: _Stamps,
        shadows: _Shadows,
        later: Iterable[str],
    ) -> None:
        super().__init__(stamps, shadows, later)
        adopt_orphans()
        self._patience_s = LATER_AFTER_S
        self._unfit = ""
        """Why this process can no longer be forked; "" if it can."""
        signal.signal(signal.SIGTERM, lambda *_: self._begin_ending())
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._is_killing = False
        self._listener: socket.socket | None = listener
        self._acceptor = Acceptor(listener)
        self._supervisor: socket.socket | None = None
        self._forked: dict[int, socket.socket] = {}
        """The connection on which each process was requested, by its pid."""
        self._checked: tuple[object, float] = (None, 0.0)
        """What `_refusal` has last accepted, and when (monotonic clock)."""
        self._gate = _Gate()
        self.selector.register(listener, selectors.EVENT_READ)

    def run(self) -> _Requested | None:
        """Serve until all children have ended. Returns a request in a forked child."""
        while self._listener is not None or _has_children():
            is_attended = self._supervisor is not None
            limit = self._patience_s if self.later else None
            begun = time.monotonic()
            events = self.events(limit if is_attended else SUPERVISOR_TIMEOUT_S)
            if not (is_attended or events):
                return None
            if events:
                self._patience_s = LATER_AFTER_S
            elif limit is not None and time.monotonic() >= begun + limit:
                self._import_next()
            for ready in events:
                if ready is self._listener:
                    requested = self._accept()
                    if requested is not None:
                        return requested
                elif ready is self._supervisor and self._supervisor is not None:
                    self.selector.unregister(self._supervisor)
                    _await_end(peer_pid(self._supervisor))
                    self._begin_ending()
                    self._is_killing = True
                else:
                    self._end_process_of(ready)
            self._reap()
            if self._is_killing:
                _kill_below()
        return None

    def _import_next(self) -> None:
        self._patience_s = 0.0  # until the next request
        try:
            self.import_next()
        except _CannotFork as error:
            self._unfit, self.later = str(error), []
        self._checked = (None, 0.0)

    def _begin_ending(self) -> None:
        """Accept no more requests, and end as soon as there are no children."""
        if self._listener is not None:
            self.selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self) -> _Requested | None:
        assert self._listener is not None
        connection = self._acceptor.accept()
        if connection is None:
            return None
        if peer_user(connection) != os.geteuid():
            connection.close()
            return None
        if self._supervisor is None:
            self._supervisor = connection
            self.selector.register(connection, selectors.EVENT_READ)
            # If it has ended, the loop reads the end of its connection next.
            with contextlib.suppress(OSError):
                send(connection, {"pid": os.getpid()})
            return None
        connection.settimeout(REQUEST_TIMEOUT_S)
        try:
            received = receive(connection, descriptors=MAX_DESCRIPTORS)
            if received is None or _is_closed(connection):
                connection.close()
                return None
            return self._fork_for(connection, *received)
        except OSError:
            connection.close()
            return None

    def _fork_for(
        self, connection: socket.socket, message: dict[str, Any], received: list[int]
    ) -> _Requested | None:
        request = Request(**message)
        if (refusal := self._refusal(request)) is not None:
            self._gate.count(request)
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
            return self._gate.added_to(request, received)
        self._gate.count(request)
        for descriptor in received:
            os.close(descriptor)
        self._forked[child] = connection
        self.selector.register(connection, selectors.EVENT_READ)
        handle = os.pidfd_open(child)
        # If the client has ended, the loop reads the end of its connection next.
        with contextlib.suppress(OSError):
            send(connection, {"pid": child}, [handle])
        os.close(handle)
        return None

    def _refusal(self, request: Request) -> str | None:
        """Why a process cannot be forked, or may import other code than a started one.

        None if there is no reason.
        """
        if self._unfit:
            return self._unfit
        path = request.environment.get("NBDIST_PATH")
        place = (request.module, request.environment.get("NBDIST_WORK_DIR"), path)
        if self._checked[0] == place and time.monotonic() < self._checked[1] + CHECK_S:
            return None
        if (changed := self.stamps.changed()) is not None:
            return f"{changed} has changed since the fork server read it"
        # The controller does not have the notebook's path.
        if request.module == ENGINE and (found := self.shadows.found(request)):
            return f"{found} hides a module that the fork server has imported"
        self._checked = (place, time.monotonic())
        return None

    def _let_go(self) -> None:
        """Close the rank host's connections. A forked child calls this."""
        for connection in (self._listener, self._supervisor, *self._forked.values()):
            if connection is not None:
                connection.close()

    def _end_process_of(self, connection: object) -> None:
        """Kill the process that was requested on a connection, which has closed."""
        for pid, other in self._forked.items():
            if other is connection:
                self.selector.unregister(other)
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for pid, code in _ended_children():
            connection = self._forked.pop(pid, None)
            if connection is not None:
                with contextlib.suppress(KeyError):
                    self.selector.unregister(connection)
                with contextlib.suppress(OSError):  # the client has ended
                    send(connection, {"code": code})
                connection.close()


def _is_closed(connection: socket.socket) -> bool:
    """Whether the client has closed the connection after its request."""
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


def _await_end(pid: int) -> None:
    """Wait until a process whose connection has closed has ended.

    The system closes a process's files a moment before its end, and the notebook takes
    what ended first for the cause.
    """
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        pidfd.ends_within(descriptor, ENDING_TIMEOUT_S)
        os.close(descriptor)


def _kill_below(apart_from: Iterable[int] = ()) -> None:
    """Kill all descendants, except some children and their descendants."""
    import psutil

    kept = set(apart_from)
    for child in psutil.Process().children():
        if child.pid not in kept:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [*child.children(recursive=True), child]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()


def _log_to(path: Path) -> None:
    """Redirect descriptors 1 and 2 to a file."""
    with contextlib.suppress(OSError):  # no room, or the cluster has ended
        log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)


# -- a requested process -----------------------------------------------------------


def _become(
    request: Request, descriptors: list[int], of_imports: Mapping[str, str]
) -> None:
    """Run the program that the client would have started without a rank host.

    Args:
        of_imports: The environment variables that imported modules have set.
    """
    numbers = dict(zip(request.descriptors, descriptors, strict=True))
    of_libffi = _of_libffi() - numbers.keys()
    _renumber(numbers | {number: number for number in of_libffi})
    for number in of_libffi:
        os.set_inheritable(number, False)
    os.setpgid(0, 0)
    request.apply()
    if request.module == ENGINE:
        for name, value in of_imports.items():
            os.environ.setdefault(name, value)
    _seed()
    _forget_folders()
    sys.argv = ["-m", *request.arguments]
    sys.orig_argv = [sys.executable, "-m", request.module, *request.arguments]
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _of_libffi() -> set[int]:
    """The descriptors of libffi, which it maps for each hundred callbacks of `ctypes`.

    It opens its own file with the first callback, and remembers the number.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            if "libffi" in os.path.basename(os.readlink(f"/proc/self/fd/{name}")):
                found.add(int(name))
    return found


def _renumber(descriptors: Mapping[int, int]) -> None:
    """Give open descriptors other numbers, and close all others.

    Args:
        descriptors: The open descriptor, by its new number.
    """
    above = 1 + max(*descriptors, *descriptors.values())
    # Copied first to numbers above all old and new ones, so that none is overwritten.
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
    """Seed this process's random generators. Python's `random` seeds itself."""
    import multiprocessing

    import numpy as np
    import torch

    np.random.seed()
    torch.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)


if __name__ == "__main__":
    main()
