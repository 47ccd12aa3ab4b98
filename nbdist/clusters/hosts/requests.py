"""Requests to the agent of a host, and their answers.

A message is a JSON object, and the bytes that it announces. Both travel on a channel
(`ipc.channels`). The requests are the methods of `answers.Answers`.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, BinaryIO

from nbdist.errors import ClusterError
from nbdist.ipc.fork_messages import receive, send

__all__ = [
    "answer_of",
    "receive_bytes",
    "receive_message",
    "send_message",
    "send_request",
]

PART_BYTES = 1 << 20
BYTES = "bytes"
"""The entry of a message with the number of bytes that follow."""


def send_request(
    channel: socket.socket,
    name: str,
    arguments: dict[str, Any],
    body: Path | bytes | None = None,
    timeout_s: float = 10.0,
) -> None:
    """Make a request.

    Args:
        channel: A channel named "ask", which is closed if this fails.
        name: The request.
        arguments: Its arguments, which JSON can hold.
        body: Bytes, or a file with bytes, that belong to the request.
        timeout_s: Seconds in which something must be received or sent.

    Raises:
        OSError: The host takes nothing.
    """
    try:
        channel.settimeout(timeout_s)
        send_message(channel, {"do": name, **arguments}, body)
    except BaseException:
        channel.close()
        raise


def answer_of(channel: socket.socket, into: BinaryIO | None = None) -> Any:
    """Wait for the answer to the request that was made on a channel, and close it.

    Args:
        channel: The channel.
        into: Where the bytes of the answer are written.

    Raises:
        OSError: The host does not answer.
        ClusterError: It answers with an error.
    """
    with channel:
        received = receive_message(channel)
        if received is None:
            raise ConnectionError("it has ended")
        message, size = received
        if "error" in message:
            raise ClusterError(message["error"])
        for part in receive_bytes(channel, size):
            if into is not None:
                into.write(part)
        return message["value"]


def send_message(
    channel: socket.socket, message: dict[str, Any], body: Path | bytes | None = None
) -> None:
    """Send a message, and bytes or the content of a file.

    Raises:
        OSError: The connection is broken, or the file cannot be read.
    """
    if not isinstance(body, Path):
        send(channel, {**message, BYTES: len(body or b"")})
        channel.sendall(body or b"")
        return
    with body.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        send(channel, {**message, BYTES: size})
        channel.sendfile(file, count=size)


def receive_message(channel: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Wait for a message.

    Returns:
        The message and the number of bytes that follow; None if the other end has
        closed the connection.

    Raises:
        OSError: The connection is broken.
    """
    received = receive(channel)
    if received is None:
        return None
    message, _ = received
    return message, message.pop(BYTES)


def receive_bytes(channel: socket.socket, size: int) -> Any:
    """Yield the bytes of a message in parts.

    Raises:
        OSError: The connection is broken, or has ended before all have arrived.
    """
    while size:
        part = channel.recv(min(size, PART_BYTES))
        if not part:
            raise ConnectionError("the connection has ended in the middle of a message")
        size -= len(part)
        yield part
