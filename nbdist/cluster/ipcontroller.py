"""The controller: ipyparallel's, with what nbdist needs of it and no more.

    python -m nbdist.cluster.ipcontroller FOLDER

It carries messages between the notebook and the ranks. Its sockets lie in the cluster's
folder, which only the user can enter. Where that folder cannot hold sockets, they are
TCP ports of the loopback interface, with CurveZMQ: who has not read the server's key in
that folder can neither send nor read.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import zmq
from ipyparallel import util
from ipyparallel.controller.app import IPController
from ipyparallel.controller.heartmonitor import start_heartmonitor
from jupyter_client.session import Session
from tornado.ioloop import PeriodicCallback
from traitlets import default
from traitlets.config import Config

from nbdist.ipc.signed_messages import Gate, SignedSession, refusals
from nbdist.wire import REFUSED

__all__ = ["Controller", "main", "transport_for"]

SOCKETS = "zmq"
"""The sockets in the cluster's folder are called "zmq:1", "zmq:2" and so on."""
MOST_SOCKETS = 99
MOST_BYTES = 256 * 2**20
"""The largest frame that is received; a peer that sends more is disconnected."""
TELL_REFUSALS_MS = 500
QUERIES = {"connection_request", "registration_request", "unregistration_request"}
BEATS = {"new_heart", "stopped_heart"}


class Controller(IPController):  # type: ignore[misc]
    """ipyparallel's controller in one process, its queues in threads without Python."""

    _sockets = 0
    _unread: tuple[Any, ...] = ()

    @default("session")
    def _signed_session(self) -> Session:
        return SignedSession(parent=self)

    # -- addresses -----------------------------------------------------------------

    def next_port(self, pool_name: str = "common") -> int:
        """A free port, or the number of the next socket in the folder."""
        if self.transport != "ipc":
            return int(super().next_port(pool_name))
        self._sockets += 1
        return self._sockets

    def construct_url(self, kind: str, channel: str, index: Any = None) -> str:
        """As ipyparallel's engines and clients write it, whatever the transport."""
        info = {
            "engine": self.engine_info,
            "client": self.client_info,
            "internal": self.internal_info,
        }[kind]
        port = info[channel] if index is None else info[channel][index]
        return f"{info['interface']}:{port}"

    def bind(self, end: Any, url: str) -> Any:
        """Bind a zmq socket."""
        end.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        return super().bind(end, url)

    # -- what runs -----------------------------------------------------------------

    def init_hub(self) -> None:
        super().init_hub()
        hub = self.hub
        # No file of the engines: where the disk is full, writing it would end the
        # registration of an engine halfway.
        hub.engine_state_file = ""
        # Only the heart's news; the hub would also keep the number of each message.
        hub.monitor.setsockopt(zmq.UNSUBSCRIBE, b"")
        hub.monitor.setsockopt(zmq.SUBSCRIBE, b"heartmonitor")
        queries = Gate(self.session, types=QUERIES)
        hub.query.on_recv(queries.before(hub.dispatch_query))
        beats = Gate(self.session, types=BEATS)
        hub.monitor.on_recv(beats.before(hub.dispatch_monitor_traffic))
        self._tell_refusals([queries, beats])
        # A thread, for a process of its own could be lost alone.
        self.heartmonitor_process = threading.Thread(
            target=start_heartmonitor,
            kwargs={
                "ping_url": self.engine_url("hb_ping"),
                "pong_url": self.engine_url("hb_pong"),
                "monitor_url": self.monitor_url,
                "config": self.config,
                "log_level": self.log_level,
                "session": SignedSession(parent=self),
                "curve_publickey": self.curve_publickey,
                "curve_secretkey": self.curve_secretkey,
            },
            name="heart",
            daemon=True,
        )

    def init_schedulers(self) -> None:
        super().init_schedulers()
        (output,) = (q for q in self.children if q.name == "IOPubScheduler")
        output.setsockopt_in(zmq.MAXMSGSIZE, MOST_BYTES)
        output.setsockopt_out(zmq.MAXMSGSIZE, MOST_BYTES)
        self.children[:] = [output, self._relay("mux"), self._relay("control")]

    def _relay(self, channel: str) -> Relay:
        """What carries requests and replies, in place of pyzmq's monitored queue."""
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
        """Nobody sends tasks; engines and clients need something to connect to."""
        self._occupy(scheduler_args["in_addr"], scheduler_args["out_addr"])

    def launch_broadcast_schedulers(
        self, monitor_url: str, children: list[Any]
    ) -> None:
        """Nobody broadcasts, as above."""
        self._occupy(self.client_url("broadcast"), self.engine_url("broadcast", 0))

    def _occupy(self, *urls: str) -> None:
        """Bind sockets that nobody reads."""
        for url in urls:
            end = self.context.socket(zmq.ROUTER)
            util.set_hwm(end, 1)
            self.bind(end, url)
            self._unread = (*self._unread, end)

    def _tell_refusals(self, gates: list[Gate]) -> None:
        """Let the notebook know how many messages were refused, whenever it changes."""
        told = 0

        def tell() -> None:
            nonlocal told
            count = refusals(gates)
            if count != told:
                told = count
                content = {"count": count}
                self.session.send(self.hub.notifier, REFUSED, content)

        self._teller = PeriodicCallback(tell, TELL_REFUSALS_MS)
        self._teller.start()


class Relay(threading.Thread):
    """Carries messages between two ROUTER sockets, each to the peer that it names.

    pyzmq's queue does so without Python, and takes a message of one frame together with
    the beginning of the next one, which is lost.
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
                sender, *frames = end.recv_multipart(copy=False)
                if len(frames) > 1:
                    recipient, *body = frames
                    self._other[end].send_multipart(
                        [recipient, sender, *body], copy=False
                    )


def transport_for(run_dir: Path) -> str:
    """ "ipc" where the cluster's folder can hold sockets, else "tcp".

    Its path may be too long for them, or its file system may have none.
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
    """How the controller of the cluster in a folder is set up."""
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
    # One process instead of nine.
    controller.use_threads = True
    controller.broadcast_scheduler_depth = 0
    controller.db_class = "NoDB"
    controller.log_level = "ERROR"
    # The hub counts an engine as there only at its next beat.
    config.HeartMonitor.period = 100
    # A paused rank is alive: the rank registry decides which ranks have died.
    config.HeartMonitor.max_heartmonitor_misses = 36_000
    return config


def main() -> None:
    """Run until the process supervisor ends it, or one of its threads has failed."""
    threading.excepthook = _end
    Controller.launch_instance(argv=[], config=configuration(Path(sys.argv[1])))


def _end(failure: threading.ExceptHookArgs) -> None:
    """End the process: without that thread it would only seem to be there."""
    threading.__excepthook__(failure)
    os._exit(1)


if __name__ == "__main__":
    main()
