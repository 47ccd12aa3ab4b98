"""Messages of the fork server and its rank hosts with the processes that they serve.

They travel on Unix sockets. Each message is a JSON object after its length, with
descriptors as ancillary data. This module imports only the standard library, because a
rank parent runs without `site`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nbdist.ipc.atomic_files import umask

TYPE_CHECKING = False  # the parent of each rank does not import `typing`
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "ENGINE",
    "FORKED",
    "FORK_TIMEOUT_S",
    "GATE",
    "MAX_DESCRIPTORS",
    "RANK_HOST",
    "RANK_PARENT",
    "SOCKET",
    "STARTED",
    "SWITCHED_OFF",
    "peer_pid",
    "peer_user",
    "receive",
    "request",
    "send",
    "socket_address",
]

SOCKET = "forks"
"""The name of a cluster's socket in its run folder."""
RANK_HOST = "the rank host"
"""The name of the process that forks a cluster's ranks, in messages and of its log."""
ENGINE = "nbdist.engine"
"""The module that a rank runs."""
FORK_TIMEOUT_S = 60.0
"""Seconds that the rank host may take to answer, with the fork server's imports."""
RANK_PARENT = "NBDIST_RANK_PARENT"
"""Environment variable of a rank: the pid of its rank parent."""
STARTED = "NBDIST_STARTED"
"""Environment variable of a rank: `FORKED`, or the reason why it was not forked."""
FORKED = "forked"
GATE = "NBDIST_GATE"
"""Environment variable of a forked rank: the descriptor of a pipe. The rank host closes
it when it has forked all ranks of the start."""
SWITCHED_OFF = "switched off by NBDIST_PRELOAD=0 or nbdist.toml"

_LENGTH = struct.Struct("!I")
_MAX_BYTES = 64 << 20
MAX_DESCRIPTORS = 253
"""The most descriptors that Linux passes with one message."""
_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid."""


def request(
    arguments: list[str],
    *,
    module: str = ENGINE,
    environment: dict[str, str] | None = None,
    folder: str | None = None,
    descriptors: list[int] | None = None,
) -> dict[str, Any]:
    """A request for a forked process, which takes over the state of this process.

    Args:
        arguments: The arguments of the forked process.
        module: The module that it runs, as `python -m` does.
        environment: Its environment. Default: that of this process.
        folder: Its working folder. Default: that of this process.
        descriptors: The numbers in the forked process of the descriptors that are sent
            with the message. Default: 0, 1 and 2.

    Returns:
        The message. `fork_server.Request` describes its entries.
    """
    return {
        "arguments": arguments,
        "module": module,
        "environment": dict(os.environ) if environment is None else environment,
        "folder": os.getcwd() if folder is None else folder,
        "umask": umask(),
        "limits": _limits(),
        "cores": _cores(),
        "descriptors": [0, 1, 2] if descriptors is None else descriptors,
    }


def _limits() -> dict[str, tuple[int, int]]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def _cores() -> list[int]:
    if sys.platform != "linux":
        return []
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """The address of a Unix socket with a path of any length, within a `with` block.

    An address in Linux has at most 107 bytes, so it names a descriptor of the folder.

    Raises:
        OSError: The folder does not exist.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def send(
    connection: socket.socket, message: object, descriptors: Sequence[int] = ()
) -> None:
    """Send a message, and copies of the descriptors.

    Raises:
        OSError: The other end is closed, or does not read within the socket's timeout.
    """
    data = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], descriptors)
    connection.sendall(data)


def receive(
    connection: socket.socket, descriptors: int = 0
) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for a message.

    Args:
        descriptors: The most descriptors that the message may have.

    Returns:
        The message and its descriptors; None if the other end is closed.

    Raises:
        OSError: The connection broke, the message did not arrive within the socket's
            timeout, or it is too long.
    """
    head, received, _, _ = socket.recv_fds(connection, _LENGTH.size, descriptors)
    try:
        rest = _exactly(connection, _LENGTH.size - len(head)) if head else None
        if rest is None:
            return None
        (size,) = _LENGTH.unpack(head + rest)
        if size > _MAX_BYTES:
            raise OSError(f"a message of {size} bytes: the most is {_MAX_BYTES}")
        data = _exactly(connection, size)
        if data is None:
            return None
        kept, received = received, []
        return json.loads(data), kept
    finally:
        for descriptor in received:
            os.close(descriptor)


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def peer_user(connection: socket.socket) -> int:
    """The uid of the process at the other end of a connection."""
    return _peer(connection)[1]


def peer_pid(connection: socket.socket) -> int:
    """The pid of the process at the other end of a connection."""
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, int]:
    raw = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return int(pid), int(uid)
