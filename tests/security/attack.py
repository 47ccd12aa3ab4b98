"""Sends foreign messages to every socket of a cluster's controller and ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import zmq
from jupyter_client.session import DELIM, Session

from nbdist import Cluster
from nbdist.ipc.direct_socket import DirectSocket, path_of
from tests.cluster_processes import ClusterProcesses

SEND_TIMEOUT_MS = 20_000
LARGE = 4 * 2**20
DIRECT = -1


@dataclass(frozen=True)
class Target:
    """A socket of the controller, and the route to a receiver behind it; or a rank's
    direct socket."""

    name: str
    url: str
    kind: int
    """The type of socket that can connect to it; `DIRECT` for a direct socket."""
    route: tuple[bytes, ...] = ()
    counted: bool = False
    """Whether a process of the cluster reads messages on this route."""


def targets(run_dir: Path, engine_uuids: Sequence[str]) -> list[Target]:
    """Every socket of a cluster's controller, and the direct socket of each rank."""
    client, engine = (connection(run_dir, end) for end in ("client", "engine"))

    def url(info: dict[str, Any], channel: str) -> str:
        port = info[channel]
        number = port[0] if isinstance(port, list) else port
        return f"{info['interface']}:{number}"

    found = [
        Target(f"{channel} to {uuid}", url(client, channel), zmq.DEALER, (uuid,), True)
        for channel in ("mux", "control")
        for uuid in map(str.encode, engine_uuids)
    ]
    found += [
        Target(f"direct to {path.name}", str(path), DIRECT, (), True)
        for path in (path_of(run_dir, uuid) for uuid in engine_uuids)
        if path.exists()  # it may be too long for a socket
    ]
    found += [
        Target("registration", url(client, "registration"), zmq.DEALER, (), True),
        Target("iopub of the ranks", url(engine, "iopub"), zmq.XPUB, (), True),
        Target("mux of the ranks", url(engine, "mux"), zmq.DEALER, (b"?",)),
        Target("control of the ranks", url(engine, "control"), zmq.DEALER, (b"?",)),
        Target("mux to no engine", url(client, "mux"), zmq.DEALER),
        Target("control to no engine", url(client, "control"), zmq.DEALER),
        Target("hb_pong", url(engine, "hb_pong"), zmq.DEALER),
        Target("hb_ping", url(engine, "hb_ping"), zmq.XSUB),
        Target("iopub", url(client, "iopub"), zmq.XSUB),
        Target("notification", url(client, "notification"), zmq.XSUB),
    ]
    for end in (client, engine):
        for channel in ("task", "broadcast"):
            found.append(Target(channel, url(end, channel), zmq.DEALER))
    known = {target.url for target in found}
    beside = {f"ipc://{path}" for path in run_dir.glob("zmq:*")} - known
    found += [Target("monitor", each, zmq.PUB) for each in beside]
    return found


def connection(run_dir: Path, end: str) -> dict[str, Any]:
    """The connection file of the "client" or an "engine" of a cluster."""
    path = run_dir / "security" / f"ipcontroller-{end}.json"
    info: dict[str, Any] = json.loads(path.read_text())
    return info


def processes(cluster: Cluster) -> list[psutil.Process]:
    """All processes of a cluster."""
    return sorted(ClusterProcesses.of(cluster).all(), key=lambda process: process.pid)


class Sender:
    """A socket for each target."""

    def __init__(self, run_dir: Path, found: Sequence[Target]) -> None:
        self._context = zmq.Context()
        key = connection(run_dir, "client")["curve_serverkey"]
        self._sockets: dict[Target, zmq.Socket[bytes] | DirectSocket] = {}
        for target in found:
            if target.kind == DIRECT:
                self._sockets[target] = DirectSocket.connect(Path(target.url))
                continue
            socket = self._context.socket(target.kind)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
            socket.setsockopt(zmq.RCVTIMEO, SEND_TIMEOUT_MS)
            if key:
                public, secret = zmq.curve_keypair()
                socket.curve_serverkey = key.encode()
                socket.curve_publickey, socket.curve_secretkey = public, secret
            socket.connect(target.url)
            if target.kind == zmq.XPUB:
                socket.recv()  # the subscription; what is sent before it is lost
            self._sockets[target] = socket

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._context.destroy(linger=SEND_TIMEOUT_MS)
        for socket in self._sockets.values():
            if isinstance(socket, DirectSocket):
                socket.close()

    def send(self, target: Target, body: Sequence[bytes]) -> bool:
        """Send a message. Returns whether the socket has accepted it."""
        try:
            self._sockets[target].send_multipart([*target.route, *body])
        except OSError:
            # A direct socket refuses large messages, and all while its rank is behind.
            if target.kind != DIRECT:
                raise
            return False
        return True


@contextmanager
def relayed(client: Any) -> Iterator[None]:
    """Send all requests of a `_Client` through the controller."""
    direct, client.direct = client.direct, dict.fromkeys(client.direct)
    try:
        yield
    finally:
        client.direct = direct


class Recorder:
    """Records the requests of a `_Client`, which pass through the controller."""

    def __init__(self, client: Any) -> None:
        self.sent: list[list[bytes]] = []
        """The messages, each from the routing identity on."""
        self._relayed = relayed(client)
        self._relayed.__enter__()
        self._streams = client._mux_stream, client._control_stream
        for stream in self._streams:
            send = stream.send_multipart
            stream.send_multipart = lambda frames, send=send, **options: (
                self.sent.append([bytes(frame) for frame in frames]),
                send(frames, **options),
            )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._relayed.__exit__(None, None, None)
        for stream in self._streams:
            del stream.send_multipart


def bad_body(rng: random.Random, genuine: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Frames from the delimiter on, which every receiver must refuse.

    Args:
        genuine: Messages that some socket has admitted before.
    """
    body = list(rng.choice(genuine))
    kind = rng.choice(
        ["forged", "unsigned", "truncated", "noise", "flipped", "longer", "replayed"]
        + (["large"] if rng.random() < 0.01 else [])
    )
    if kind == "forged":
        stranger = Session(key=b"not the key of this cluster")
        kinds = ["stream", "nbdist_request", "nbdist_telemetry", "shutdown_request"]
        return list(stranger.serialize(stranger.msg(rng.choice(kinds))))
    if kind == "unsigned":
        body[1] = b""
    elif kind == "truncated":
        body = body[: rng.randrange(1, 6)]
    elif kind == "noise":
        body = [rng.randbytes(rng.randrange(300)) for _ in range(rng.randrange(1, 12))]
        if rng.random() < 0.5:
            body[0] = DELIM
    elif kind == "flipped":
        number = rng.choice([n for n in range(1, len(body)) if body[n]])
        frame = bytearray(body[number])
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        body[number] = bytes(frame)
    elif kind == "longer":
        body.append(rng.randbytes(5))
    elif kind == "large":
        body[rng.randrange(1, len(body))] = bytes(LARGE)
    return body


def genuine_requests(cluster: Cluster) -> list[list[bytes]]:
    """Requests that ranks have carried out, each from the delimiter on."""
    client = cluster._live().client._client
    with Recorder(client) as recorder:
        cluster.execute("kept = 1")
        cluster.status()
    return [frames[1:] for frames in recorder.sent]


def attack(
    cluster: Cluster, count: int, genuine: Sequence[Sequence[bytes]], seed: int
) -> int:
    """Send invalid messages to every socket. Returns how many must be counted."""
    registry = cluster._live()
    found = targets(registry.run_dir, [info.engine_uuid for info in registry.infos])
    rng = random.Random(seed)
    counted = 0
    with Sender(registry.run_dir, found) as sender:
        for number in range(count):
            target = found[number % len(found)]
            sent = sender.send(target, bad_body(rng, genuine))
            counted += sent and target.counted
    return counted


def refused(cluster: Cluster) -> int:
    """The number of messages that the cluster has refused so far."""
    return cluster.refused(cluster.status())
