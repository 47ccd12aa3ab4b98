"""The server of a kept cluster: the process that controls the ranks.

`python -m nbdist.clusters.kept.server` runs it. It has the `Cluster`, so that ranks are
watched, released and replaced whether or not a notebook is attached. One notebook at a
time is attached, which has calls made and is passed what they show. The server ends
with the ranks: when it is told to stop them, and when no notebook was attached for a
number of hours.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from nbdist.clusters import fork_server_client, transfer
from nbdist.clusters.cluster import SILENT_WAIT_S, Cluster
from nbdist.clusters.futures import CallFuture
from nbdist.clusters.kept import directory
from nbdist.clusters.kept.cell_record import CellRecord
from nbdist.clusters.kept.messages import (
    Answer,
    Call,
    Cell,
    Description,
    Follow,
    Goodbye,
    Hello,
    Holder,
    Interrupt,
    Item,
    Look,
    Marked,
    Note,
    Order,
    Ranks,
    Refusal,
    Reply,
    Seen,
    SendComms,
    Shown,
    ShowWidgets,
    Values,
    Welcome,
    connection_of,
)
from nbdist.clusters.kept.peer import Peer
from nbdist.clusters.kept.relayed_comms import RelayedComms
from nbdist.clusters.kept.relayed_reader import RelayedReader
from nbdist.clusters.observer import Event, Observer
from nbdist.clusters.startup import Progress
from nbdist.clusters.startup_status import runs
from nbdist.errors import (
    CellError,
    CellInterrupted,
    CellTimeout,
    ClusterError,
    NbdistError,
    text_of,
)
from nbdist.ipc import folders
from nbdist.ipc.listening import Acceptor
from nbdist.ipc.locks import Condition
from nbdist.ipc.prctl import name_process
from nbdist.ipc.resources import host_name
from nbdist.telemetry.collector import Collector
from nbdist.wire import Batch, MarkKind, RankInfo

__all__ = ["main"]

LOOKS_AT_ONCE = 8
HOUR_S = 3600.0
MOST_SILENT = 32
"""Connections that may be open without a message. Each has a thread."""
HELLO_TIMEOUT_S = 60.0
"""Seconds in which the first message arrives."""
VISIT_LIMIT_S = 60.0
"""Seconds that a visitor's call may take if it sets no limit; cells set their own."""
LEAST_LEFT_S = 0.05
FINISH_S = 2.0
"""Seconds in which a notebook receives the last message."""


class ClusterServer:
    """Serves one cluster.

    Args:
        order: What to start.
        listener: The server's socket.
    """

    def __init__(self, order: Order, listener: socket.socket) -> None:
        self._order, self._listener = order, listener
        self._folder = Path(order.server_folder)
        self._begun = time.time()
        self._cluster = Cluster(**order.options)
        self._cluster.on_note = self._note
        self._reader = RelayedReader(lambda peer: peer in self._peers)
        self._cluster.reader = self._reader
        self._comms = RelayedComms(is_live=order.shows_widgets)
        self._cluster.comms = self._comms
        self._cluster.collector = RelayedCollector(self._send)
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        """Notified when a notebook has left, and when the server is to end."""
        self._peers: set[Peer] = set()
        """The processes that are served: the notebook, and the visitors."""
        self._visitors: dict[Peer, int] = {}
        """The pid of each visitor."""
        self._holder: tuple[Peer, Holder] | None = None
        self._free_since: float | None = self._begun
        """When the last notebook has left; None while one is attached."""
        self._notes: list[str] = []
        """What no notebook has been told."""
        self._records: dict[int, CellRecord] = {}
        self._keys = itertools.count(1)
        self._calls: dict[tuple[Peer, int], CallFuture[Any]] = {}
        """By notebook and its number of the call."""
        self._visits: dict[CallFuture[Any], Visit] = {}
        """The calls of visitors that run or wait for their turn."""
        self._looks = ThreadPoolExecutor(LOOKS_AT_ONCE, "nbdist-looks")
        self._is_starting = True
        self._is_ending = False

    def serve(self) -> None:
        """Serve until the ranks were stopped, or no notebook was attached for long."""
        threading.Thread(target=self._accept, daemon=True).start()
        with self._changed:
            while not self._is_ending and self._left_s() != 0.0:
                self._changed.wait(self._left_s())
            self._is_ending = True
        self._cluster.stop()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.finish(Goodbye(f"{self._order.name} was stopped"), FINISH_S)
        self._remove_files()

    def end(self) -> None:
        """Have `serve` return. Any thread may call this."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    def _left_s(self) -> float | None:
        """The seconds until the end, unless a notebook attaches; None for no end."""
        if self._free_since is None:
            return None
        left_s = self._free_since + self._order.hours * HOUR_S - time.time()
        return min(max(0.0, left_s), threading.TIMEOUT_MAX)

    def _remove_files(self) -> None:
        self._listener.close()
        name, pid = self._order.name, os.getpid()
        entry = directory.Entry(name, host_name(), str(self._folder), pid)
        with contextlib.suppress(OSError):
            directory.release(entry)

    # -- connections -----------------------------------------------------------------

    def _accept(self) -> None:
        """Take connections until the socket is closed at the end."""
        acceptor = Acceptor(self._listener)
        silent = Silent()
        with contextlib.suppress(OSError):
            while True:
                end = acceptor.accept()
                if end is None:
                    continue
                with end, contextlib.suppress(PermissionError):
                    connection = connection_of(end)
                    silent.add(connection)
                    try:
                        Greeting(connection, self._greet, silent).start()
                    except RuntimeError:  # no thread can begin
                        silent.discard(connection)
                        connection.close()

    def _greet(self, connection: Connection, hello: Hello) -> None:
        """Answer the first message of a connection."""
        if hello.purpose == "attach":
            self._attach(connection, hello)
            return
        if hello.purpose == "visit":
            self._visit(connection, hello)
            return
        with connection:
            if hello.purpose == "stop":
                self._cluster.stop()
            connection.send(Welcome(self._description()))
            if hello.purpose == "stop":
                self.end()

    def _attach(self, connection: Connection, hello: Hello) -> None:
        peer = Peer(connection, self._take, self._lose)
        with self._lock:
            if self._holder is not None:
                former, holder = self._holder
                # A process that was killed has ended before its connection has, which
                # its children may have inherited.
                if not hello.by_force and runs(holder.pid):
                    connection.send(Refusal(self._held_by(holder)))
                    connection.close()
                    return
                self._forget(former)
                self._peers.discard(former)
                self._reader.leave(former)
                self._comms.leave(former)
                former.finish(Goodbye(f"process {hello.pid} has attached by force"))
            if self._is_ending:
                connection.send(Refusal("the cluster is being stopped"))
                connection.close()
                return
            self._holder = peer, Holder(hello.pid, time.time())
            self._free_since = None
            self._peers.add(peer)
            notes, self._notes = self._notes, []
            cells = tuple(record.cell for record in self._records.values())
            values = self._cluster.collector.state()
            peer.send(Welcome(self._description(), values, cells, tuple(notes)))
        peer.start()

    def _visit(self, connection: Connection, hello: Hello) -> None:
        """Serve a process beside the notebook that is attached."""
        peer = Peer(connection, self._take, self._lose)
        with self._lock:
            if self._is_ending:
                connection.send(Refusal("the cluster is being stopped"))
                connection.close()
                return
            self._peers.add(peer)
            self._visitors[peer] = hello.pid
            peer.send(Welcome(self._description()))
        peer.start()

    def _held_by(self, holder: Holder) -> str:
        since = time.strftime("%H:%M", time.localtime(holder.since))
        return (
            f"process {holder.pid} is attached to {self._order.name} since {since}: "
            "%dist_detach there, or --force here"
        )

    def _lose(self, peer: Peer) -> None:
        """A connection has ended."""
        with self._lock:
            self._forget(peer)
            self._peers.discard(peer)
            self._visitors.pop(peer, None)
            visits = list(self._visits.items())
        for future, visit in visits:
            if visit.peer is peer and visit.is_look:  # nobody waits for it
                future.interrupt()
        self._reader.leave(peer)
        self._comms.leave(peer)

    def _forget(self, peer: Peer) -> None:
        """Pass nothing more on to a notebook."""
        with self._lock:
            if self._holds(peer):
                self._holder, self._free_since = None, time.time()
                self._changed.notify_all()
            for record in self._records.values():
                record.leave(peer)

    def _description(self) -> Description:
        cluster, free = self._cluster, self._free_since
        is_up = not self._is_starting and cluster.running
        return Description(
            name=self._order.name,
            host=host_name(),
            pid=os.getpid(),
            folder=folders.name(),
            begun=self._begun,
            hours=self._order.hours,
            size=cluster.size if is_up else 0,
            died=tuple(cluster.died()) if is_up else (),
            doing=" and ".join(each.what for each in cluster.background_calls),
            holder=None if self._holder is None else self._holder[1],
            ends=None if free is None else free + self._order.hours * HOUR_S,
        )

    # -- what is passed on -----------------------------------------------------------

    def _send(self, message: object) -> bool:
        """Pass a message on to the notebook. Returns whether one is attached."""
        with self._lock:
            if self._holder is None:
                return False
            self._holder[0].send(message)
            return True

    def _note(self, text: str) -> None:
        with self._lock:
            if not self._send(Note(text)):
                self._notes.append(text)

    # -- requests --------------------------------------------------------------------

    def _take(self, peer: Peer, message: object) -> None:
        """Begin to do what a notebook requests. Runs on the peer's thread."""
        if isinstance(message, Call):
            self._begin(peer, message)
        elif isinstance(message, Look):
            self._looks.submit(self._answer, peer, message)
        elif isinstance(message, Interrupt):
            self._interrupt(peer, message.number)
        elif isinstance(message, Follow):
            self._follow(peer, message)
        elif isinstance(message, ShowWidgets):
            self._comms.show_in(peer)
        elif isinstance(message, SendComms):
            self._send_comms(peer, message)
        elif isinstance(message, Answer):
            self._reader.answer(message.token, message.reply)
        elif isinstance(message, Seen):
            with self._lock:
                record = self._records.pop(message.key, None)
            if record is not None:
                record.remove()

    def _send_comms(self, peer: Peer, message: SendComms) -> None:
        """Have the callbacks of widgets called, and pass on what they show."""
        self._comms.changed_by_user(message.messages)
        done = Reply(message.number)

        def show(output: dict[str, Any]) -> None:
            content = {name: output[name] for name in ("msg_type", "content")}
            peer.send(Shown(message.number, Item("output", content)))

        future = self._cluster.send_comms(message.engine, message.messages, show)
        if future is None:
            peer.send(done)
        else:
            future.add_done_callback(lambda _: peer.send(done))

    def _answer(self, peer: Peer, look: Look) -> None:
        """Read an attribute, or call a method that does not wait for its turn."""
        peer.send(_outcome(look, lambda: _resolved(self._cluster, look)))
        if look.name == "stop":
            self.end()

    def _begin(self, peer: Peer, call: Call) -> None:
        """Have a call made after those before it."""
        record = None if call.cell is None else self._recorded(peer, call, call.cell)

        limit_s = call.kwargs.get("timeout_s") if call.name == "_call" else None
        pid = self._visitors.get(peer)
        if pid is not None and call.name == "_call" and limit_s is None:
            limit_s = VISIT_LIMIT_S
        what, ahead, turn = _name_of(call, pid), "", Turn(limit_s)

        def show(item: Item) -> None:
            if record is not None:
                record.append(item)
            else:
                peer.send(Shown(call.number, item))

        def ask(item: Item) -> Peer | None:
            if record is not None:
                return record.ask(item)
            peer.send(Shown(call.number, item))
            return peer

        def finish(reply: Reply) -> None:
            if record is not None:
                record.conclude(reply)
            elif peer.is_open:
                peer.send(reply)
            elif isinstance(reply.value, list):
                transfer.refuse(reply.value)
            if call.name == "start" and reply.error is not None:
                self.end()

        def end_cancelled(_future: object) -> None:
            if future.cancelled():
                waited = f": it waited for {ahead}" if ahead else ""
                error: CellError = CellInterrupted(
                    f"{what} was interrupted before it began{waited}"
                )
                if turn.is_late:
                    error = CellTimeout(
                        f"{what} did not begin within {limit_s:.2g} s{waited}"
                    )
                finish(Reply(call.number, error=error))

        def work() -> None:
            turn.begin()
            with self._reader.through(show, ask):
                finish(_outcome(call, lambda: self._call(turn.shortened(call), show)))

        is_busy = bool(self._cluster.background_calls)
        # A rank is replaced at once where the queue may wait for it.
        if call.at_once or (call.name == "replace" and is_busy):
            threading.Thread(target=work, name="nbdist-call", daemon=True).start()
            return
        with self._lock:
            self._calls = {k: f for k, f in self._calls.items() if not f.done()}
            self._visits = {f: v for f, v in self._visits.items() if not f.done()}
            ahead = self._names_of_visits() if is_busy else ""
            future = self._cluster.in_background(work, what)
            self._calls[peer, call.number] = future
            if pid is not None:
                self._visits[future] = Visit(peer, call.cell is None)
            if record is not None:
                record.future = future
        if ahead and self._holds(peer):
            turn.after(SILENT_WAIT_S, lambda: self._say_what_is_ahead(future))
        if limit_s is not None and is_busy:
            turn.after(limit_s, lambda: turn.give_up(future))
        future.add_done_callback(end_cancelled)

    def _names_of_visits(self) -> str:
        """The calls of visitors that run or wait for their turn."""
        return " and ".join(
            f"{future.what} since {future.seconds or 0:.0f} s"
            for future in self._visits
            if not future.done()
        )

    def _say_what_is_ahead(self, future: CallFuture[None]) -> None:
        """Tell the notebook why its call has not begun."""
        with self._lock:
            ahead = self._names_of_visits()
        if ahead and not (future.running() or future.done()):
            self._note(
                f"waits for {ahead}, on the same ranks: the interrupt button ends this "
                "wait, and what an assistant looks at"
            )

    def _recorded(self, peer: Peer, call: Call, cell: Cell) -> CellRecord:
        """Record what a cell shows, and pass it on to a notebook."""
        key = next(self._keys)
        record = CellRecord(replace(cell, key=key), self._folder / f"cell-{key}")
        with self._lock:
            self._records[key] = record
            if peer in self._visitors:
                code = cell.code.strip().partition("\n")[0]
                self._note(f"process {self._visitors[peer]} runs a cell: {code}")
            if peer in self._peers:
                peer.send(Shown(call.number, Item("key", key)))
                record.follow(peer, call.number)
        return record

    def _follow(self, peer: Peer, message: Follow) -> None:
        """Pass a cell on to a notebook that has attached meanwhile."""
        with self._lock:
            record = self._records.get(message.key)
            if record is not None and record.future is not None:
                self._calls[peer, message.number] = record.future
        if record is None:
            error = ClusterError("another notebook has seen the end of this cell")
            peer.send(Reply(message.number, error=error))
            return
        with contextlib.suppress(OSError):  # it has ended
            record.follow(peer, message.number)
        with self._lock:
            if peer not in self._peers:
                record.leave(peer)

    def _holds(self, peer: Peer) -> bool:
        """Whether this is the notebook that is attached."""
        return self._holder is not None and self._holder[0] is peer

    def _call(self, call: Call, show: Callable[[Item], None]) -> Any:
        """Call a method of the cluster, which shows what it does."""
        kwargs = dict(call.kwargs)
        if call.name in ("start", "restart"):
            kwargs["on_progress"] = Progressing(show)
            getattr(self._cluster, call.name)(**kwargs)
            self._is_starting = False
            return None
        if "observer" in kwargs:
            kwargs["observer"] = Observing(show)
        return getattr(self._cluster, call.name)(*call.args, **kwargs)

    def _interrupt(self, peer: Peer, number: int) -> None:
        with self._lock:
            future = self._calls.get((peer, number))
            looks = [each for each, visit in self._visits.items() if visit.is_look]
        if self._is_starting:
            error = CellInterrupted("the start was interrupted; nothing is left")
            peer.finish(Reply(number, error=error), FINISH_S)
            self._remove_files()
            os._exit(1)  # the process supervisor ends what was started
        if future is not None:
            if self._holds(peer) and not future.running():
                for each in looks:
                    each.interrupt()
            future.interrupt()
            self._reader.interrupt_read()


class Silent:
    """The connections whose first message has not arrived, the oldest first."""

    def __init__(self) -> None:
        self._connections: list[Connection] = []
        self._lock = threading.Lock()

    def add(self, connection: Connection) -> None:
        """Add a connection. The oldest ones end if there are too many."""
        with self._lock:
            self._connections.append(connection)
            while len(self._connections) > MOST_SILENT:
                # Its thread sees the end, and closes it.
                _shut(self._connections.pop(0))

    def discard(self, connection: Connection) -> None:
        """Leave out a connection whose message has arrived, or which has ended."""
        with self._lock, contextlib.suppress(ValueError):
            self._connections.remove(connection)


def _shut(connection: Connection) -> None:
    """End a connection for both ends. Its descriptor stays open."""
    end = socket.socket(fileno=connection.fileno())
    with contextlib.suppress(OSError):  # the other end has ended it
        end.shutdown(socket.SHUT_RDWR)
    end.detach()


class Visit(NamedTuple):
    """A call of a visitor."""

    peer: Peer
    is_look: bool
    """Whether it runs no cell."""


class Turn:
    """The time that a call waits for its turn, which counts for its time limit.

    Args:
        limit_s: The seconds that it may take, its wait included; None for no limit.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s, self._since = limit_s, time.monotonic()
        self._timers: list[threading.Timer] = []
        self.is_late = False
        """Whether the time has passed before the call has begun."""

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        """Act after this time, unless the call has begun."""
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def give_up(self, future: CallFuture[None]) -> None:
        """Cancel a call that has not begun."""
        self.is_late = not future.running()
        future.cancel()

    def begin(self) -> None:
        """End the timers, because the call begins."""
        for timer in self._timers:
            timer.cancel()

    def shortened(self, call: Call) -> Call:
        """The call, with the time limit that is left."""
        if self._limit_s is None:
            return call
        left_s = max(self._limit_s + self._since - time.monotonic(), LEAST_LEFT_S)
        return replace(call, kwargs={**call.kwargs, "timeout_s": left_s})


class Greeting(threading.Thread):
    """Receives the first message of a connection, which may never arrive.

    Args:
        connection: The connection.
        greet: Called with the connection and the message.
        silent: Has the connection until its message arrives.
    """

    def __init__(
        self,
        connection: Connection,
        greet: Callable[[Connection, Hello], None],
        silent: Silent,
    ) -> None:
        super().__init__(daemon=True)
        self._connection, self._greet, self._silent = connection, greet, silent

    def run(self) -> None:
        hello = None
        with contextlib.suppress(OSError, EOFError):
            if self._connection.poll(HELLO_TIMEOUT_S):
                hello = self._connection.recv()
        self._silent.discard(self._connection)
        if hello is None:
            self._connection.close()
            return
        with contextlib.suppress(OSError, EOFError):
            self._greet(self._connection, hello)


class RelayedCollector(Collector):
    """Keeps what the ranks log, and passes it on.

    Args:
        send: Sends a message to the notebook that is attached.
    """

    def __init__(self, send: Callable[[object], bool]) -> None:
        super().__init__()
        self._send = send

    def receive(self, batch: Batch) -> None:
        super().receive(batch)
        self._send(Values(batch))

    def mark(self, kind: MarkKind, text: str, ranks: Iterable[int] = ()) -> None:
        concerned = tuple(ranks)
        super().mark(kind, text, concerned)
        self._send(Marked(kind, text, concerned))

    def set_ranks(self, ranks: Iterable[RankInfo]) -> None:
        infos = tuple(ranks)
        super().set_ranks(infos)
        self._send(Ranks(infos))


class Observing(Observer):
    """Passes the events of a call on."""

    def __init__(self, show: Callable[[Item], None]) -> None:
        self._show = show

    def take(self, event: Event) -> None:
        self._show(Item.of(event))

    def due(self) -> float | None:
        return None

    def notice(self, text: str) -> None:
        self._show(Item("notice", text))

    def make_room(self) -> None:
        self._show(Item("make_room"))


class Progressing:
    """Passes the progress of a start on."""

    def __init__(self, show: Callable[[Item], None]) -> None:
        self._show = show

    def __call__(self, progress: Progress) -> None:
        self._show(Item("progress", progress))


def _name_of(call: Call, visitor: int | None) -> str:
    """The name of a call, for those who wait for it."""
    name = str(call.args[3]) if call.name == "_call" else call.name.lstrip("_")
    name = name if call.cell is None else f"In[{call.cell.number}]"
    return name if visitor is None else f"{name} of process {visitor}, a visitor,"


def _resolved(cluster: Cluster, look: Look) -> Any:
    value = getattr(cluster, look.name)
    return value(*look.args, **look.kwargs) if callable(value) else value


def _outcome(look: Look, work: Callable[[], Any]) -> Reply:
    """Do what was requested. Returns the result or the error."""
    try:
        return Reply(look.number, work())
    except NbdistError as error:
        return Reply(look.number, error=error)
    except BaseException as error:  # noqa: BLE001 - the notebook raises it
        return Reply(look.number, error=ClusterError(text_of(error)))


def main() -> None:
    """Serve the cluster of the `Order` on standard input.

    The command line has the descriptor of the server's socket.
    """
    listener = socket.socket(fileno=int(sys.argv[1]))
    order: Order = pickle.load(sys.stdin.buffer)
    name_process("nbdist server")
    sys.path[:] = order.path
    folders.enter(order.folder)
    server = ClusterServer(order, listener)
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: server.end())
    server.serve()
    fork_server_client.close()


if __name__ == "__main__":
    main()
