"""What a rank's parent, a fork server and the notebook say to each other.

Each message is a JSON object, with its length before it and with descriptors beside it,
on a Unix socket. The standard library alone: a rank's parent runs without `site`.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nbdist.ipc.atomic_files import umask

__all__ = [
    "FORKED",
    "MAX_DESCRIPTORS",
    "RANK_HOST",
    "RANK_PARENT",
    "SOCKET",
    "STARTED",
    "SWITCHED_OFF",
    "Request",
    "peer_user",
    "receive",
    "send",
    "socket_address",
]

SOCKET = "forks"
"""The name of a cluster's socket in its run folder."""
RANK_HOST = "the rank host"
"""What messages call the process that forks a cluster's ranks, and its log."""
RANK_PARENT = "NBDIST_RANK_PARENT"
"""The variable that tells a rank the pid of its parent process."""
STARTED = "NBDIST_STARTED"
"""The variable that tells a rank how it was started: `FORKED`, or why it was not."""
FORKED = "forked"
SWITCHED_OFF = "NBDIST_PRELOAD=0 is set"

_LENGTH = struct.Struct("!I")
_MAX_BYTES = 64 << 20
MAX_DESCRIPTORS = 253
"""How many Linux takes beside one message."""
_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid."""


@dataclass(frozen=True)
class Request:
    """The state of a rank's parent that the forked rank takes over.

    The rank's descriptors travel beside it.
    """

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str = field(default_factory=os.getcwd)
    umask: int = field(default_factory=umask)
    limits: dict[str, tuple[int, int]] = field(default_factory=lambda: _limits())
    """(soft, hard) by the name of `resource`'s constant."""
    cores: list[int] = field(default_factory=lambda: _cores())
    """The cores that it may run on; empty where the system does not say."""
    descriptors: list[int] = field(default_factory=lambda: [0, 1, 2])
    """The numbers that the descriptors beside this message have in the rank."""

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> Request:
        return cls(**message)

    @property
    def message(self) -> dict[str, Any]:
        return asdict(self)

    def apply(self) -> None:
        """Take the state over in this process, all but the arguments."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.umask(self.umask)
        for name, limit in self.limits.items():
            # A hard limit below the wanted one cannot be raised.
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(getattr(resource, name), (limit[0], limit[1]))
        if self.cores:
            with contextlib.suppress(OSError):  # cores that were taken away meanwhile
                os.sched_setaffinity(0, self.cores)
        os.chdir(self.folder)


def _limits() -> dict[str, tuple[int, int]]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def _cores() -> list[int]:
    if sys.platform != "linux":
        return []
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """The address of a Unix socket, within a `with` block; its path may be long.

    Linux takes 107 bytes, so the address goes through a descriptor of the folder.

    Raises:
        OSError: There is no such folder.
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
        OSError: The other end is closed, or does not read.
    """
    data = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], descriptors)
    connection.sendall(data)


def receive(
    connection: socket.socket, descriptors: int = 0
) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for a message.

    Args:
        descriptors: How many may come beside it.

    Returns:
        The message and its descriptors; None when the other end is closed.

    Raises:
        OSError: The connection broke, or the rest of a message does not come in time.
    """
    head, received, _, _ = socket.recv_fds(connection, _LENGTH.size, descriptors)
    try:
        rest = _exactly(connection, _LENGTH.size - len(head)) if head else None
        if rest is None:
            return None
        (size,) = _LENGTH.unpack(head + rest)
        if size > _MAX_BYTES:
            raise OSError(f"a message of {size} bytes: at most {_MAX_BYTES} are taken")
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
    """The user whose process made the other end of a connection, as Linux says."""
    raw = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return int(uid)
