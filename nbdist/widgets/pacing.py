"""Limits the messages to a front end that may be slow, blocked, reloading or closed.

A front end acknowledges each message that it has drawn. A missing acknowledgement has
two possible causes. Either no front end is open, and the server stores each message; or
a cell keeps the kernel too busy to receive the acknowledgement. The kernel cannot
distinguish them. Therefore the delay between messages grows with the silence, so that
their number grows only with the logarithm of the silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Pacer"]

SHORTEST_S = 0.1
LONGEST_S = 5.0
BYTES_PER_S = 4_000_000
PATIENCE_S = 60.0
SILENCE_PER_DELAY = 300


class Pacer:
    """Decides how long to wait between messages, and which of them must be complete.

    A complete message has all data. It is sent when a front end requests it, and each
    time that the silence has doubled. It replaces messages that were lost, or that were
    sent before the front end had loaded, while the kernel cannot receive a request.

    Args:
        clock: Seconds, from any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked = True
        self._silent_since: float | None = None
        self._complete_after_s = 2 * SHORTEST_S

    @property
    def silence_s(self) -> float:
        """Seconds since the oldest message that was not acknowledged."""
        if self._silent_since is None:
            return 0.0
        return self._clock() - self._silent_since

    def sent(self) -> None:
        """Record that a message was sent."""
        if self._silent_since is None:
            self._silent_since = self._clock()

    def acknowledged(self) -> None:
        """Record that a front end has drawn a message."""
        self._silent_since = None
        self._complete_after_s = PATIENCE_S

    def ask(self) -> None:
        """Record that a front end asks for all data."""
        self._asked = True

    def next_is_complete(self) -> bool:
        """Whether the next message must be complete. A call clears the request."""
        silence = self.silence_s
        if not self._asked and silence < self._complete_after_s:
            return False
        self._asked = False
        self._complete_after_s = max(self._complete_after_s, 2 * silence)
        return True

    def delay_s(self, size: int) -> float:
        """Seconds to wait after a message of `size` bytes."""
        wanted = max(SHORTEST_S, self.silence_s / SILENCE_PER_DELAY, size / BYTES_PER_S)
        return min(wanted, LONGEST_S)
