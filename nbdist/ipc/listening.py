"""Accepts connections also when this process has no free descriptor."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time

__all__ = ["Acceptor"]

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE_S = 0.05
"""Seconds before another attempt where not even the spare descriptor is left. Nothing
tells a process that another part of it has closed a file."""


class Acceptor:
    """Accepts the connections of a listening socket, one by one.

    It has a spare descriptor. When there is no other, it gives it to the next
    connection, which it closes at once: the other end is refused instead of being left
    to wait, and a loop that asks when there is a connection does not turn for ever.

    Args:
        listener: The socket. Its owner closes it, and then this.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._spare: int | None = None
        self._take_spare()

    def accept(self) -> socket.socket | None:
        """The next connection; None if it has ended meanwhile, or was refused.

        Raises:
            OSError: The listener is closed.
        """
        try:
            return self._listener.accept()[0]
        except BlockingIOError:
            return None
        except OSError as error:
            if self._listener.fileno() < 0 or error.errno in (
                errno.EBADF,
                errno.EINVAL,
            ):
                raise
            if error.errno in EXHAUSTED:
                self._refuse()
            return None

    def close(self) -> None:
        """Close the spare descriptor. A second close does nothing."""
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)

    def _refuse(self) -> None:
        if self._spare is None:
            time.sleep(PAUSE_S)
        self.close()
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._take_spare()

    def _take_spare(self) -> None:
        with contextlib.suppress(OSError):  # another thread has taken it
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
