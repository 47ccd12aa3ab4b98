"""ipyparallel's controller, reduced to the parts that nbdist uses.

    python -m nbdist.clusters.ipcontroller FOLDER

It carries messages between the notebook and the ranks. Its sockets are Unix sockets in
the cluster's folder, which only the user can enter. If that folder cannot hold sockets,
they are TCP ports of the loopback interface with CurveZMQ. A process that has not read
the server's key in that folder can then neither send nor receive.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq
from ipyparallel import util
from ipyparallel.controller.app import IPController
from jupyter_client.session import Session
from tornado.ioloop import PeriodicCallback
from traitlets import default
from traitlets.config import Config
from zmq.eventloop.zmqstream import ZMQStream

from nbdist.ipc import folders
from nbdist.ipc.atomic_files import write_atomically
from nbdist.ipc.bare_application import BareApplication
from nbdist.ipc.prctl import name_process
from nbdist.ipc.signed_messages import Gate, SignedSession, refusals
from nbdist.wire import REFUSED

__all__ = ["Controller", "main", "transport_for"]

SOCKETS = "zmq"
"""The sockets in the cluster's folder are named "zmq:1", "zmq:2" and so on."""
MOST_SOCKETS = 99
MOST_AT_ONCE = 100
"""Messages that a relay receives from one side before it polls the other side."""
MOST_BYTES = 256 * 2**20
"""The largest frame that is received; a peer that sends more is disconnected."""
TELL_REFUSALS_MS = 500
QUERIES = {"connection_request", "registration_request", "unregistration_request"}


class Controller(BareApplication, IPController):  # type: ignore[misc]
    """ipyparallel's controller in one process. Its queues run in threads."""

    _sockets = 0
    _unread: tuple[Any, ...] = ()

    @default("session")
    def _signed_session(self) -> Session:
        return SignedSession(parent=self)

    def save_connection_dict(self, fname: str, cdict: dict[str, Any]) -> None:
        """Write a connection file. It appears complete: ranks may wait for it."""
        write_atomically(
            Path(self.profile_dir.security_dir) / fname,
            lambda file: file.write(json.dumps(cdict, indent=2).encode()),
            mode=0o600,
            durable=False,
        )

    # -- addresses -----------------------------------------------------------------

    def next_port(self, pool_name: str = "common") -> int:
        """A free port, or the number of the next socket in the folder."""
        if self.transport != "ipc":
            return int(super().next_port(pool_name))
        self._sockets += 1
        return self._sockets

    def construct_url(self, kind: str, channel: str, index: Any = None) -> str:
        """The address in the form that ipyparallel's engines and clients use."""
        info = {
            "engine": self.engine_info,
            "client": self.client_info,
            "internal": self.internal_info,
        }[kind]
        port = info[channel] if index is None else info[channel][index]
        return f"{info['interface']}:{port}"

    def bind(self, end: Any, url: str) -> Any:
        """Bind a zmq socket, with a limit on the size of a frame."""
        end.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        return super().bind(end, url)

    # -- signals, sockets and threads ----------------------------------------------

    def init_signal(self) -> None:
        """Leave SIGTERM's default, which ends this process at once.

        The process supervisor removes what this process leaves behind.
        """

    def init_hub(self) -> None:
        with _no_pause():
            super().init_hub()
        hub = self.hub
        # Write no file of the engines. On a full disk, the write would fail in the
        # middle of an engine's registration.
        hub.engine_state_file = ""
        # The hub receives no copies of messages. It would store each message's id.
        hub.monitor.setsockopt(zmq.UNSUBSCRIBE, b"")
        queries = Gate(self.session, types=QUERIES)
        hub.query.on_recv(queries.before(hub.dispatch_query))
        self._tell_refusals([queries])
        # A separate process, as in ipyparallel, could be killed by itself.
        self.heartmonitor_process = Arrivals(self)

    def init_schedulers(self) -> None:
        super().init_schedulers()
        (output,) = (q for q in self.children if q.name == "IOPubScheduler")
        output.setsockopt_in(zmq.MAXMSGSIZE, MOST_BYTES)
        output.setsockopt_out(zmq.MAXMSGSIZE, MOST_BYTES)
        self.children[:] = [output, self._relay("mux"), self._relay("control")]

    def _relay(self, channel: str) -> Relay:
        """A relay of requests and replies. It replaces pyzmq's monitored queue."""
        ends = []
        for url, side in (
            (self.client_url(channel), "in"),
            (self.engine_url(channel), "out"),
        ):
            end = self.context.socket(zmq.ROUTER)
            util.set_hwm(end, 0)
            end.setsockopt(zmq.IDENTITY, f"{channel}_{side}".encode())
            self.bind(end, url)
            ends.append(end)
        return Relay(channel, *ends)

    def launch_python_scheduler(
        self, name: str, scheduler_args: dict[str, Any], children: list[Any]
    ) -> None:
        """Bind the unused sockets of tasks, to which engines and clients connect."""
        self._occupy(scheduler_args["in_addr"], scheduler_args["out_addr"])

    def launch_broadcast_schedulers(
        self, monitor_url: str, children: list[Any]
    ) -> None:
        """Bind the sockets of broadcasts, which are not used."""
        self._occupy(self.client_url("broadcast"), self.engine_url("broadcast", 0))

    def _occupy(self, *urls: str) -> None:
        """Bind sockets from which no message is read."""
        for url in urls:
            end = self.context.socket(zmq.ROUTER)
            util.set_hwm(end, 1)
            self.bind(end, url)
            self._unread = (*self._unread, end)

    def _tell_refusals(self, gates: list[Gate]) -> None:
        """Send the notebook the number of refused messages whenever it changes."""
        reported = 0

        def tell() -> None:
            nonlocal reported
            count = refusals(gates)
            if count != reported:
                reported = count
                content = {"count": count}
                self.session.send(self.hub.notifier, REFUSED, content)

        self._teller = PeriodicCallback(tell, TELL_REFUSALS_MS)
        self._teller.start()


class Arrivals:
    """Tells the hub of each engine that has connected, in place of a heart monitor.

    An engine connects its heart last, when it can receive requests. The heart returns
    each message that it receives. ipyparallel's heart monitor sends a message every few
    seconds, so that an engine counts as registered only seconds after it has connected.
    This class sends a message when a heart connects, and none later: the rank registry
    decides which ranks have died.
    """

    def __init__(self, controller: Controller) -> None:
        self._hub = controller.hub
        self._hearts = self._stream(controller, zmq.XPUB, "hb_ping")
        # A message for each heart: all of them subscribe to the same.
        self._hearts.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._answers = self._stream(controller, zmq.ROUTER, "hb_pong")

    @staticmethod
    def _stream(controller: Controller, kind: int, channel: str) -> Any:
        end = controller.context.socket(kind)
        util.set_hwm(end, 0)
        controller.bind(end, controller.engine_url(channel))
        return ZMQStream(end, controller.loop)

    def start(self) -> None:
        """Begin to receive. IPController calls this with the schedulers' threads."""
        self._hearts.on_recv(self._on_heart)
        self._answers.on_recv(self._on_answer)

    def _on_heart(self, _frames: list[bytes]) -> None:
        if self._hub.incoming_registrations:
            self._hearts.send(b"")

    def _on_answer(self, frames: list[bytes]) -> None:
        heart = frames[0]
        if heart in self._hub.incoming_registrations:
            self._hub.finish_registration(heart)


@contextlib.contextmanager
def _no_pause() -> Iterator[None]:
    """Make `time.sleep` return at once, while this process has one thread.

    ipyparallel gives its database 0.25 s to connect, and there is no database.
    """
    sleep = time.sleep
    time.sleep = lambda _seconds: None
    try:
        yield
    finally:
        time.sleep = sleep


class Relay(threading.Thread):
    """Carries each message between two ROUTER sockets to the peer that it names.

    pyzmq's own queue is not used because it loses messages: it joins a message of one
    frame with the beginning of the next message.
    """

    def __init__(self, name: str, clients: Any, engines: Any) -> None:
        super().__init__(name=name, daemon=True)
        self._other = {clients: engines, engines: clients}

    def run(self) -> None:
        """Carry messages until the process ends."""
        poller = zmq.Poller()
        for end in self._other:
            poller.register(end, zmq.POLLIN)
        while True:
            for end, _ in poller.poll():
                with contextlib.suppress(zmq.Again):
                    for _ in range(MOST_AT_ONCE):
                        self._carry(end)

    def _carry(self, end: Any) -> None:
        """Carry one message.

        Raises:
            zmq.Again: No message has arrived.
        """
        sender, *frames = end.recv_multipart(zmq.NOBLOCK, copy=False)
        if len(frames) > 1:
            recipient, *body = frames
            self._other[end].send_multipart([recipient, sender, *body], copy=False)


def transport_for(run_dir: Path) -> str:
    """ "ipc" if the cluster's folder can hold sockets, otherwise "tcp".

    The folder's path may be too long for a socket, or its file system may have none.
    """
    last = run_dir / f"{SOCKETS}:{MOST_SOCKETS}"
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(last))
        last.unlink()
    except OSError:
        return "tcp"
    return "ipc"


def configuration(run_dir: Path) -> Config:
    """The configuration of the controller for the cluster in a folder."""
    config = Config()
    config.ProfileDir.location = str(run_dir)
    config.Session.key = secrets.token_hex(32).encode()
    controller = config.IPController
    controller.transport = transport_for(run_dir)
    if controller.transport == "ipc":
        controller.ip = str(run_dir / SOCKETS)
    else:
        controller.ip = "127.0.0.1"
        controller.enable_curve = True
    controller.location = "127.0.0.1"
    # The default is the folder in which ipyparallel's module was imported.
    controller.work_dir = folders.current()
    # One process instead of nine.
    controller.use_threads = True
    controller.broadcast_scheduler_depth = 0
    controller.db_class = "NoDB"
    controller.log_level = logging.ERROR
    return config


def main() -> None:
    """Run until the process supervisor ends this process, or until a thread fails."""
    threading.excepthook = _end
    run_dir = Path(sys.argv[1])
    name_process(f"nbdist controller of {run_dir}")
    Controller.launch_instance(argv=[], config=configuration(run_dir))


def _end(failure: threading.ExceptHookArgs) -> None:
    """End the process, because it does not work without the failed thread."""
    threading.__excepthook__(failure)
    os._exit(1)


if __name__ == "__main__":
    main()
