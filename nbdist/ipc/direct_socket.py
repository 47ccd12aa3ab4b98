"""Unix sockets between the notebook and each rank, which bypass the controller.

A request through the controller and its reply wake threads fourteen times. Through a
direct socket they wake three: the rank's main thread, the notebook's client thread, and
the thread that waits for the call.

Each rank listens in the run folder, and the notebook connects to it. A message is one
packet. The first messages in each direction have the frames that the controller would
carry, and a `Gate` checks them. A connection that has carried an admitted message is
*trusted*: the system delivers its packets unchanged, once and in their order, and only
from the process that has signed that message. Later messages are *brief*: they have a
short head and no signature. The signature and Jupyter's headers take half of the time
of a small call.

A message that a direct socket does not accept goes through the controller.
"""

from __future__ import annotations

import errno
import pickle
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "DirectSocket",
    "brief_packet",
    "head_of",
    "listen",
    "packet_of",
    "path_of",
]

MOST_BYTES = 1 << 16
"""The largest packet. A socket's buffer holds three of them."""
_COUNT = struct.Struct("<I")
_BRIEF = b"<nbdist>"
"""The first frame of a brief message."""


def path_of(run_dir: Path, engine_uuid: str) -> Path:
    """The path of the socket on which an engine listens."""
    return run_dir / f"direct:{engine_uuid}"


def listen(path: Path) -> socket.socket | None:
    """Listen on a path. None if the system or the folder has no such sockets."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except (AttributeError, OSError):  # macOS has no SOCK_SEQPACKET
        return None
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen()
    except OSError:
        listener.close()
        return None
    return listener


class DirectSocket:
    """One end of a connection. It sends and receives whole messages, and never blocks.

    Any thread may send. One thread receives.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self.header: dict[str, Any] | None = None
        """The header of a message that a gate has admitted from this connection; None
        if the connection is not trusted."""

    @classmethod
    def connect(cls, path: Path) -> DirectSocket:
        """Connect to a rank, at once.

        Raises:
            OSError: Nothing listens on the path, or too many have connected.
        """
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            end.setblocking(False)
            end.connect(str(path))
        except BaseException:
            end.close()
            raise
        return cls(end)

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    def send(self, packet: Sequence[Any]) -> None:
        """Send a packet whole, or not at all.

        Args:
            packet: Made by `packet_of`, or by `brief_packet` if the other end trusts
                the connection. It does if it has sent a message that this end has
                admitted.

        Raises:
            OSError: The other end is too far behind, or it is closed.
        """
        self._end.sendmsg(packet, (), socket.MSG_NOSIGNAL)

    def send_multipart(self, frames: Sequence[Any], copy: bool = True) -> None:
        """Send a message whole, or not at all. The arguments are those of zmq's socket.

        Raises:
            OSError: As for `packet_of` and `send`.
        """
        self.send(packet_of(frames))

    def receive(self) -> list[memoryview] | None:
        """The frames of the next message; None if the other end is closed.

        Bytes that are no message become one frame.

        Raises:
            BlockingIOError: No message has arrived.
        """
        try:
            packet = memoryview(self._end.recv(MOST_BYTES))
        except ConnectionError:
            return None
        return _frames_of(packet) if packet else None


def packet_of(frames: Sequence[Any]) -> list[Any]:
    """The packet of a message. It refers to the frames, which are not copied.

    Raises:
        OSError: The message is too large for one packet.
    """
    views = [memoryview(frame).cast("B") for frame in frames]
    sizes = struct.pack(f"<{1 + len(views)}I", len(views), *map(len, views))
    if len(sizes) + sum(map(len, views)) > MOST_BYTES:
        raise OSError(errno.EMSGSIZE, "the message exceeds one packet")
    return [sizes, *views]


def brief_packet(head: tuple[Any, ...], frames: Sequence[Any]) -> list[Any]:
    """The packet of a brief message.

    Args:
        head: What `head_of` returns at the other end.
        frames: The other frames.

    Raises:
        OSError: The message is too large for one packet.
    """
    return packet_of([_BRIEF, pickle.dumps(head, 5), *frames])


def head_of(frames: Sequence[memoryview]) -> tuple[Any, ...] | None:
    """The head of a brief message, whose other frames begin at 2.

    The head is unpickled, as the other frames are later. The connection must be
    trusted.

    Returns:
        None if it is a signed message.
    """
    if len(frames) < 2 or frames[0] != _BRIEF:
        return None
    head: tuple[Any, ...] = pickle.loads(frames[1])
    return head


def _frames_of(packet: memoryview) -> list[memoryview]:
    try:
        (count,) = _COUNT.unpack_from(packet)
        sizes = struct.unpack_from(f"<{count}I", packet, _COUNT.size)
    except struct.error:
        return [packet]
    frames = []
    begin = _COUNT.size * (1 + count)
    for size in sizes:
        frames.append(packet[begin : begin + size])
        begin += size
    return frames
