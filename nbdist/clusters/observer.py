"""Events of a running call, and the protocol of its observers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["QUIET", "Event", "Observer", "Quiet"]

Message = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """A rank has printed something, or has finished."""

    rank: int
    output: Message | None
    """The Jupyter message, a stream, display_data, execute_result or clear_output;
    None when the rank has finished."""
    seconds: float
    """Seconds since the call began."""
    process: str = ""
    """UUID of the engine. Another engine may take its rank's number later."""
    outcome: str = "finished"
    """The end of the call on the rank, once it has ended: "finished", "failed",
    "interrupted", "timed out", "died", or "left" if the world became smaller."""


class Observer(Protocol):
    """Observes a call, in the thread that waits for it."""

    def take(self, event: Event) -> None:
        """Called with each event. The events of one rank arrive in their order."""

    def due(self) -> float | None:
        """Called before each wait. Returns the seconds until it must be called again;
        None for no limit."""

    def notice(self, text: str) -> None:
        """Called with the ranks' positions in a stall, and with "" at its end."""

    def make_room(self) -> None:
        """Called before the user is asked for a line: show all output so far."""


class Quiet:
    """An observer that does nothing."""

    def take(self, event: Event) -> None:
        pass

    def due(self) -> float | None:
        return None

    def notice(self, text: str) -> None:
        pass

    def make_room(self) -> None:
        pass


QUIET = Quiet()
