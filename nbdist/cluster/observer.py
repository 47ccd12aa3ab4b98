"""What happens while ranks work on a request, and who watches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Event", "Observer", "Quiet"]

Message = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """Something that happened on a rank: it printed, or it finished."""

    rank: int
    output: Message | None
    """The Jupyter message: a stream, display_data, execute_result or clear_output."""
    seconds: float
    """Since the run began."""
    process: str = ""
    """The engine it happened in; a rank's number may pass to another."""
    outcome: str = "finished"
    """How the rank's part has ended: "finished", "failed", "interrupted", "timed out",
    "died", or "left" where the world became smaller. Without an output only."""


class Observer(Protocol):
    """Watches a run, from the thread that waits for it."""

    def take(self, event: Event) -> None:
        """Called for each event, in each rank's own order."""

    def due(self) -> float | None:
        """Called before each wait; the seconds until it wants to be called again."""

    def notice(self, text: str) -> None:
        """Called when no rank gets on: where each of them is. "" once one does."""


class Quiet:
    """An observer that looks away."""

    def take(self, event: Event) -> None:
        pass

    def due(self) -> float | None:
        return None

    def notice(self, text: str) -> None:
        pass
