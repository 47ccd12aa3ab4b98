"""A cluster that outlives the notebook's kernel."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from nbdist.clusters.cluster import Cluster
from nbdist.clusters.comm_receiver import IGNORED, CommReceiver
from nbdist.clusters.futures import BackgroundCalls
from nbdist.clusters.hosts.host_list import HostSlots
from nbdist.clusters.kept import directory
from nbdist.clusters.kept.link import Callbacks, Link, Unasked
from nbdist.clusters.kept.messages import (
    SOCKET,
    Call,
    Cell,
    Comms,
    CommsEnded,
    CommsKept,
    Description,
    Follow,
    Hello,
    Look,
    Marked,
    Order,
    Ranks,
    Reply,
    Seen,
    SendComms,
    ShowWidgets,
    Values,
)
from nbdist.clusters.observer import QUIET, Observer
from nbdist.clusters.result import CellResult
from nbdist.clusters.startup import Progress
from nbdist.clusters.startup_status import tail_of
from nbdist.config import Setting
from nbdist.errors import (
    AlreadyRunning,
    ClusterError,
    NotRunning,
    RankDied,
    StartError,
    UsageError,
)
from nbdist.ipc import folders
from nbdist.ipc.fork_messages import socket_address
from nbdist.ipc.interrupts import spare_entries
from nbdist.ipc.locks import Future
from nbdist.ipc.private_files import make_run_folder, remove_folders
from nbdist.ipc.shm_payload import Shipment
from nbdist.telemetry.collector import Collector
from nbdist.widgets.marimo_cell import end_with_cell
from nbdist.widgets.user_input import UserInput
from nbdist.wire import CommMessage, RankInfo, RankProfile

if TYPE_CHECKING:
    from typing_extensions import Self

    from nbdist.clusters.collective_history import CollectiveHistory
    from nbdist.clusters.ipp_client import Answer

__all__ = ["DEFAULT_HOURS", "KeptCluster"]

DEFAULT_HOURS = 12.0
LOOK_TIMEOUT_S = 60.0
"""Seconds in which the server answers a look."""
END_TIMEOUT_S = 20.0
"""Seconds in which the server ends after its ranks."""
LOG = "server.log"
"""The file of the server's standard output and error, in its folder."""


class KeptCluster(Cluster):
    """A cluster whose ranks outlive this process.

    A process of its own, the *server*, controls the ranks. This object has the methods
    of `Cluster`, which the server carries out. When this process ends or detaches, the
    ranks keep their variables and go on with their cell, and dead ranks are replaced as
    before. `nbdist.attach` attaches another process, which gets the output of cells
    whose end nobody has seen. A cluster to which nothing is attached for `hours` is
    stopped.

    While no notebook shows a cell, its ranks cannot ask for input, and a debugger on a
    rank lets the rank go on. The end of a `with` block detaches.

    Args:
        n: The number of ranks, as for `Cluster`.
        hours: The hours that the ranks run while nothing is attached.
        name: The name to attach by. Default: that of the notebook or of the working
            folder, with a number if it is taken.
        options: As for `Cluster`.

    Raises:
        UsageError: An option is invalid, or the name is taken.
    """

    purpose = "attach"
    """`Hello.purpose` of the connection."""

    def __init__(
        self,
        n: int | None = None,
        *,
        hours: float = DEFAULT_HOURS,
        name: str | None = None,
        **options: Any,
    ) -> None:
        if not 0 < hours < threading.TIMEOUT_MAX:
            raise UsageError(f"--keep {hours:g}: expected hours above 0")
        if name is not None:
            directory.check(name)
        self._options = {"n": n, **options}
        self._prepare(name or "", Cluster(**self._options).size)
        self._hours = hours

    def _prepare(self, name: str, size: int) -> None:
        """Set what every object has, attached or not."""
        self.name = name
        self._size = size
        self._infos: list[RankInfo] = []
        self._link: Link | None = None
        self._is_stopping = False
        self._background = BackgroundCalls()
        self._cells = 0
        self.collector = Collector()
        self.comms: CommReceiver = IGNORED
        self.reader = UserInput()
        self.on_wait = self.on_note = _print
        end_with_cell(self.leave)

    def __repr__(self) -> str:
        state = "attached" if self._link is not None else "not attached"
        return f"<nbdist.KeptCluster {self.name!r} of {self.size} ranks, {state}>"

    def __exit__(self, *exc_info: object) -> None:
        self.detach()

    async def __aexit__(self, *exc_info: object) -> None:
        self.detach()

    # -- attaching and detaching -----------------------------------------------------

    @classmethod
    def attached(cls, entry: directory.Entry, *, by_force: bool = False) -> Self:
        """Attach to a cluster that runs.

        Args:
            entry: The cluster.
            by_force: Detach another process that is attached.

        Raises:
            AlreadyRunning: Another process is attached.
            ClusterError: The server does not answer.
            OSError: There is no server.
        """
        cluster = cls.__new__(cls)
        cluster._prepare(entry.name, 0)
        cluster._attach(Path(entry.folder), by_force=by_force)
        try:
            cluster._adopt(cluster._look("infos"))
            cluster.config = cluster._look("config")
        except BaseException:
            cluster.detach()
            raise
        return cluster

    def _attach(self, folder: Path, **options: Any) -> None:
        spare_entries()
        self._is_stopping = False
        by_force = options.pop("by_force", False)
        hello = Hello(self.purpose, os.getpid(), by_force)
        link = Link(folder, hello, self.name, self._receive, self._on_end, **options)
        if link.welcome.values:
            self.collector.restore(link.welcome.values)
        self._link = link
        link.start()

    def detach(self) -> None:
        """Leave the ranks to run. A second call has no effect.

        Cells go on. Those that are queued in this process and have not begun are
        cancelled.
        """
        link, self._link = self._link, None
        self._background.cancel()
        if link is not None:
            link.close()
            self.comms.keep(set())

    leave = detach

    @property
    def description(self) -> Description:
        """The cluster as it was when this process attached."""
        return self._live_link().welcome.description

    @property
    def notes(self) -> tuple[str, ...]:
        """What happened while no process was attached."""
        return self._live_link().welcome.notes

    @property
    def unseen_cells(self) -> tuple[Cell, ...]:
        """The cells whose end nobody had seen when this process attached."""
        return self._live_link().welcome.cells

    def follow(self, cell: Cell, observer: Observer = QUIET) -> CellResult:
        """Show what a cell has shown so far and will show, and wait until its end.

        Args:
            cell: One of `unseen_cells`.
            observer: Receives each output.

        Returns:
            As `execute`.

        Raises:
            CellError: As for `execute`.
        """
        reply, _ = self._live_link().see_through(
            lambda number: Follow(number, cell.key),
            observer,
            self._background,
            self.reader,
            asks=False,
        )
        return self._seen(reply, cell.key)

    # -- starting, changing and stopping ---------------------------------------------

    def start(
        self, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> KeptCluster:
        """Start the server and every rank, as `Cluster.start`."""
        if self._link is not None:
            raise AlreadyRunning(f"{self.name} is running already")
        try:
            folder = make_run_folder()
        except OSError as error:
            raise StartError(str(error)) from error
        with contextlib.ExitStack() as on_error:
            on_error.callback(remove_folders, folder)
            process = _server(folder)
            on_error.callback(_kill, process)
            entry = directory.claim(self.name or None, folder, process.pid)
            on_error.callback(directory.release, entry)
            self.name = entry.name
            _order(process, self._order(folder))
            try:
                self._attach(folder, timeout_s=LOOK_TIMEOUT_S)
            except (OSError, ClusterError) as error:
                log = tail_of((folder / LOG).read_text(errors="replace"))
                raise StartError(f"the cluster's server has ended: {log}") from error
            on_error.callback(self.detach)
            self.show_widgets()
            self._request("start", on_progress=on_progress)
            self.config = self._look("config")
            on_error.pop_all()
        # It stays a zombie until someone waits for it.
        threading.Thread(
            target=process.wait, name="nbdist-server-exit", daemon=True
        ).start()
        return self

    def _order(self, folder: Path) -> Order:
        return Order(
            self.name,
            self._hours,
            str(folder),
            folders.current(),
            tuple(sys.path),
            self._options,
            self.comms.is_live,
        )

    def show_widgets(self) -> None:
        """Have `comms` receive the widgets of the ranks, and what becomes of them."""
        if self.comms.is_live:
            self._live_link().send(ShowWidgets())

    def stop(self) -> None:
        """End every rank and the server. Safe to call twice."""
        link = self._link
        if link is None:
            return
        pid = link.welcome.description.pid
        self._is_stopping = True
        try:
            with contextlib.suppress(ClusterError):
                self._look("stop")
        finally:
            self.detach()
            end_server(pid)

    def restart(
        self, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> KeptCluster:
        """Stop, start with the same options and size, and run the setup cells."""
        self._request("restart", at_once=True, on_progress=on_progress)
        return self

    def scale(
        self,
        n: int | None = None,
        *,
        hosts: str | Sequence[HostSlots] | None = None,
        drop: bool = False,
    ) -> str:
        """As `Cluster.scale`."""
        note: str = self._request(
            "scale", n, hosts=hosts, drop=drop, at_once=self._background.busy
        )
        return note

    def replace(self, ranks: Iterable[int]) -> None:
        """As `Cluster.replace`."""
        self._request("replace", list(ranks), at_once=self._background.busy)

    def repair(self) -> None:
        """As `Cluster.repair`."""
        self._await_background()
        self._request("repair")

    @property
    def running(self) -> bool:
        """Whether this process is attached, and the ranks run."""
        link = self._link
        return link is not None and not link.ending and bool(self._look("running"))

    @property
    def size(self) -> int:
        """The world size."""
        return len(self._infos) or self._size

    @property
    def ranks(self) -> list[RankInfo]:
        """Every living rank, in rank order."""
        ranks: list[RankInfo] = self._look("ranks")
        return ranks

    @property
    def infos(self) -> list[RankInfo]:
        """Every rank, including dead ones, in rank order."""
        self._live_link()
        return list(self._infos)

    @property
    def fault_tolerant(self) -> bool:
        """As `Cluster.fault_tolerant`."""
        return bool(self._look("fault_tolerant"))

    @property
    def mpi(self) -> str:
        """As `Cluster.mpi`."""
        return str(self._look("mpi"))

    def settings(self) -> list[Setting]:
        """As `Cluster.settings`."""
        settings: list[Setting] = self._look("settings")
        return settings

    def died(self) -> dict[int, RankDied]:
        """As `Cluster.died`."""
        died: dict[int, RankDied] = self._look("died")
        return died

    @property
    def _run_dir(self) -> Path:
        return Path(self._look("_run_dir"))

    def _check_started(self) -> None:
        self._live_link()

    # -- running code ----------------------------------------------------------------

    def send_comms(
        self,
        engine_uuid: str,
        messages: tuple[CommMessage, ...],
        on_output: Callable[[dict[str, Any]], None],
    ) -> Future[Answer] | None:
        """As `Cluster.send_comms`."""
        link, callbacks = self._link, Callbacks(on_output)
        if link is None:
            return None
        try:
            link.call_back(
                lambda number: SendComms(number, engine_uuid, messages), callbacks
            )
        except ClusterError:
            return None
        return callbacks.done

    def _execute(
        self,
        code: str,
        ranks: Iterable[int] | None,
        timeout_s: float | None,
        check: bool,
        number: int,
        setup: bool,
        observer: Observer,
    ) -> CellResult:
        self._await_background()
        self.comms.send_waiting()
        chosen = self._chosen(ranks)
        cell = Cell(0, number, tuple(chosen), code)
        arguments = code, chosen, timeout_s, check, number, setup
        return self._run("_execute", cell, observer, *arguments)

    def run_script(
        self,
        path: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        observer: Observer = QUIET,
        **options: Any,
    ) -> CellResult:
        """As `Cluster.run_script`."""
        self._await_background()
        script = os.fspath(path)
        if not options.get("module"):
            script = os.path.join(folders.current(), os.path.expanduser(path))
        cell = Cell(0, 0, tuple(range(self.size)), os.path.basename(script))
        return self._run("run_script", cell, observer, script, list(args), **options)

    def _call(
        self,
        target: str,
        args: tuple[object, ...],
        ranks: Iterable[int] | None,
        what: str,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        *,
        needs_all: bool = False,
    ) -> list[Any]:
        self._await_background()
        values: list[Any] = self._request(
            "_call",
            target,
            args,
            None if ranks is None else list(ranks),
            what,
            timeout_s=timeout_s,
            observer=observer,
            needs_all=needs_all,
        )
        return values

    def _debug(self, rank: int, *, observer: Observer = QUIET) -> None:
        self._await_background()
        self._request("_debug", rank, observer=observer)

    def _synchronize(self) -> None:
        """Do nothing, because the server does it."""

    def _forget(self, shipment: Shipment) -> None:
        self._look("_forget", shipment)

    def _select(self, ranks: Iterable[int] | None) -> list[int]:
        self._await_background()
        chosen = None if ranks is None else list(ranks)
        selected: list[int] = self._request("_select", chosen)
        return selected

    def _chosen(self, ranks: Iterable[int] | None) -> list[int]:
        """The ranks of a cell, which the server checks."""
        return sorted(set(range(self.size) if ranks is None else ranks))

    @property
    def _seconds_at_prompts(self) -> float:
        return float(self._look("_seconds_at_prompts"))

    # -- the state of the ranks ------------------------------------------------------

    def collectives(
        self, ranks: Iterable[int] | None = None, *, count: int = 20
    ) -> CollectiveHistory:
        """As `Cluster.collectives`."""
        chosen = None if ranks is None else list(ranks)
        history: CollectiveHistory = self._look("collectives", chosen, count=count)
        return history

    def last_seen(self, rank: int) -> str:
        """As `Cluster.last_seen`."""
        return str(self._look("last_seen", rank))

    def failed_rank(self, rank: int | None = None) -> int:
        """As `Cluster.failed_rank`."""
        return int(self._look("failed_rank", rank))

    def interrupt(self) -> None:
        """As `Cluster.interrupt`."""
        self._look("interrupt")

    @property
    def _refused_here(self) -> int:
        return int(self._look("_refused_here"))

    def _ask(self, target: str, *args: object, **options: Any) -> dict[int, Any]:
        answers: dict[int, Any] = self._look("_ask", target, *args, **options)
        return answers

    def _profiles(self, ranks: set[int]) -> dict[int, RankProfile | None]:
        found: dict[int, RankProfile | None] = self._look("_profiles", ranks)
        return found

    # -- the server ------------------------------------------------------------------

    def _live_link(self) -> Link:
        if self._link is None:
            raise NotRunning(
                "no cluster is attached: %dist_attach attaches to one that is kept"
            )
        return self._link

    def _look(self, name: str, *args: object, **kwargs: Any) -> Any:
        """Read an attribute of the server's cluster, or call a method at once."""
        _, pending = self._live_link().request(
            lambda number: Look(number, name, args, kwargs)
        )
        reply = pending.reply(LOOK_TIMEOUT_S)
        if reply is None:
            raise ClusterError(
                f"the server of {self.name} does not answer within {LOOK_TIMEOUT_S:g} s"
            )
        return _value(reply)

    def _request(
        self,
        name: str,
        *args: object,
        observer: Observer = QUIET,
        at_once: bool = False,
        on_progress: Callable[[Progress], None] = lambda _: None,
        **kwargs: Any,
    ) -> Any:
        """Have the server's cluster call a method in turn, and wait for its end."""
        if observer is not QUIET:
            kwargs["observer"] = None  # the server puts its own here
        reply, _ = self._live_link().see_through(
            lambda number: Call(number, name, args, kwargs, at_once=at_once),
            observer,
            self._background,
            self.reader,
            on_progress,
        )
        return _value(reply)

    def _run(
        self, name: str, cell: Cell, observer: Observer, *args: object, **kwargs: Any
    ) -> CellResult:
        """Have the server's cluster run a cell, whose output it records."""
        kwargs["observer"] = None
        reply, key = self._live_link().see_through(
            lambda number: Call(number, name, args, kwargs, cell),
            observer,
            self._background,
            self.reader,
        )
        return self._seen(reply, key)

    def _seen(self, reply: Reply, key: int | None) -> CellResult:
        """The result of a cell, after telling the server that it has arrived."""
        if key is not None and self._link is not None:
            with contextlib.suppress(ClusterError):  # it has ended
                self._link.send(Seen(key))
        result: CellResult = _value(reply)
        return result

    def _receive(self, message: Unasked) -> None:
        """Take what the server sends by itself. Runs on the link's thread."""
        if isinstance(message, Values):
            self.collector.receive(message.batch)
        elif isinstance(message, Marked):
            self.collector.mark(message.kind, message.text, message.ranks)
        elif isinstance(message, Ranks):
            self._adopt(message.infos)
        elif isinstance(message, Comms):
            self.comms.receive(message.engine, message.batch)
        elif isinstance(message, CommsEnded):
            self.comms.ended(message.engine)
        elif isinstance(message, CommsKept):
            self.comms.keep(message.engines)
        else:
            self.on_note(message.text)

    def _adopt(self, infos: Iterable[RankInfo]) -> None:
        self._infos = list(infos)
        self.collector.set_ranks(self._infos)

    def _on_end(self, why: str) -> None:
        if not self._is_stopping:
            self.on_note(f"{self.name}: {why}")


def end_server(pid: int, timeout_s: float = END_TIMEOUT_S) -> None:
    """Wait until a server that was told to stop has ended; kill it if it does not.

    If it is killed, its process supervisor ends all processes of the cluster.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        try:
            process.wait(timeout_s)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(END_TIMEOUT_S)


def _server(folder: Path) -> subprocess.Popen[bytes]:
    """Start a server, which waits for its order."""
    with (folder / LOG).open("ab") as log, socket.socket(socket.AF_UNIX) as listener:
        with socket_address(folder / SOCKET) as address:
            listener.bind(address)
        listener.listen()
        descriptor = listener.fileno()
        return subprocess.Popen(
            [sys.executable, "-m", "nbdist.clusters.kept.server", str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # it outlives the kernel's process group
            pass_fds=[descriptor],
            cwd=Path(__file__).parents[3],  # where `nbdist` can be imported from
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a server whose start has failed, which ends by itself if it can."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    process.kill()
    process.wait()


def _order(process: subprocess.Popen[bytes], order: Order) -> None:
    """Tell a server what to start."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        pickle.dump(order, process.stdin)


def _value(reply: Reply) -> Any:
    if reply.error is not None:
        raise reply.error
    return reply.value


def _print(text: str) -> None:
    print(text, file=sys.stderr)
