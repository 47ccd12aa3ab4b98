"""How often to send to a front end that may be slow, blocked, reloading or gone.

A front end acknowledges what it got. Silence has two causes that the kernel cannot
tell apart: nobody is looking, and the server stores each message; or a cell keeps the
kernel too busy to hear, while somebody watches. So the pace falls with the length of
the silence, and the number of messages grows with its logarithm.
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
    """Says how long to wait between messages, and which of them must stand alone.

    A message that stands alone carries everything. It is sent when a front end asks,
    and whenever the silence has doubled: what is sent before the front end has loaded,
    or is lost, is so made up for while no request can be heard.

    Args:
        clock: Seconds, from any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked = True
        self._silent_since: float | None = None
        self._stand_alone_after_s = 2 * SHORTEST_S

    @property
    def silence_s(self) -> float:
        """Seconds since the oldest message that was not acknowledged."""
        if self._silent_since is None:
            return 0.0
        return self._clock() - self._silent_since

    def sent(self) -> None:
        """A message was sent."""
        if self._silent_since is None:
            self._silent_since = self._clock()

    def acknowledged(self) -> None:
        """A front end has drawn what it got."""
        self._silent_since = None
        self._stand_alone_after_s = PATIENCE_S

    def ask(self) -> None:
        """A front end wants everything."""
        self._asked = True

    def next_stands_alone(self) -> bool:
        """Whether to send everything now; a request is answered once."""
        silence = self.silence_s
        if not self._asked and silence < self._stand_alone_after_s:
            return False
        self._asked = False
        self._stand_alone_after_s = max(self._stand_alone_after_s, 2 * silence)
        return True

    def delay_s(self, size: int) -> float:
        """Seconds to wait after a message of `size` bytes."""
        wanted = max(SHORTEST_S, self.silence_s / SILENCE_PER_DELAY, size / BYTES_PER_S)
        return min(wanted, LONGEST_S)
