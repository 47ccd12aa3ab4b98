"""A process that is connected to the server of a kept cluster."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from nbdist.ipc.locks import Condition

__all__ = ["Peer"]

MOST_WAITING = 20_000
"""Messages that may wait for a process, before it counts as gone."""
MOST_IN_TURN = 1_000
"""Messages that may wait before one of `send_in_turn`."""
SLOW_S = 30.0
"""Seconds that a message of `send_in_turn` may wait for a process."""


class Peer:
    """One connection. A thread receives, and another one sends.

    `send` never waits, so that a notebook that is stopped or slow does not delay the
    ranks. A notebook that is too far behind is disconnected, and may attach again.

    Args:
        connection: The connection.
        take: Called with this peer and each message, on the receiving thread.
        gone: Called with this peer when the connection has ended, on that thread. The
            other process sees the end after that.
    """

    def __init__(
        self,
        connection: Connection,
        take: Callable[[Peer, Any], None],
        gone: Callable[[Peer], None],
    ) -> None:
        self._connection = connection
        self._take, self._gone = take, gone
        self._waiting: deque[Any] = deque()
        self._changed = Condition()
        """Notified when a message waits, when one was sent, and at the end."""
        self._is_last = False
        """Whether no further message is sent."""
        self.is_open = True
        """Whether the connection has not ended."""
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, daemon=True)

    def start(self) -> None:
        """Begin to receive and to send."""
        self._sender.start()
        self._receiver.start()

    def send(self, message: object) -> None:
        """Send a message after those before, without a wait."""
        with self._changed:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(message)
                self._changed.notify_all()
                return
        self.close()

    def send_in_turn(self, message: object) -> None:
        """Send a message after those before. Waits until there is room for it.

        Raises:
            ConnectionError: The process has ended, or does not receive.
        """
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: len(self._waiting) < MOST_IN_TURN or not self.is_open, SLOW_S
            )
            if has_room and self.is_open:
                self._waiting.append(message)
                self._changed.notify_all()
                return
        self.close()
        raise ConnectionError("the notebook has ended")

    def finish(self, last: object, timeout_s: float = 0.0) -> None:
        """Send a last message, and end the connection once it was sent.

        Args:
            last: The message.
            timeout_s: Seconds to wait for that.
        """
        with self._changed:
            self._waiting.append(last)
            self._is_last = True
            self._changed.notify_all()
        self._sender.join(timeout_s)

    def close(self) -> None:
        """End the connection. A second close does nothing."""
        if self._end():
            shut_down(self._connection)

    def _end(self) -> bool:
        """Let nobody wait for this process any more. False if that was done before."""
        with self._changed:
            if not self.is_open:
                return False
            self.is_open = False
            self._changed.notify_all()
            return True

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._next()) is not None:
                self._connection.send(message)
        self.close()

    def _next(self) -> object:
        """The next message to send; None at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._is_last or not self.is_open
            )
            if not self.is_open or not self._waiting:
                return None
            self._changed.notify_all()
            return self._waiting.popleft()

    def _receive_all(self) -> None:
        try:
            with contextlib.suppress(OSError, EOFError):
                while True:
                    self._take(self, self._connection.recv())
        finally:
            self._end()
            self._gone(self)
            shut_down(self._connection)
            self._sender.join()
            self._connection.close()


def shut_down(connection: Connection, how: int = socket.SHUT_RDWR) -> None:
    """End a connection on which another thread may be waiting.

    Args:
        connection: The connection.
        how: `socket.SHUT_WR` ends it for the other process only.
    """
    with contextlib.suppress(OSError):
        end = socket.socket(fileno=connection.fileno())
        try:
            end.shutdown(how)
        finally:
            end.detach()
