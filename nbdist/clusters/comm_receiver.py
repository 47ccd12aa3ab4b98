"""The protocol of whoever shows the ranks' widgets."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from nbdist.wire import CommBatch

__all__ = ["IGNORED", "CommReceiver"]


class CommReceiver(Protocol):
    """Receives the messages of the ranks' comms. Engines are named by their UUIDs."""

    is_live: bool
    """Whether it shows widgets. Otherwise ranks use texts in their place."""

    def receive(self, engine: str, batch: CommBatch) -> None:
        """Called with messages of an engine, in their order, on one thread."""

    def ended(self, engine: str) -> None:
        """Called on the same thread when an engine has died."""

    def send_waiting(self) -> None:
        """Called before a cell is sent: send what the user has done before it."""

    def keep(self, engines: Set[str]) -> None:
        """Called with the engines that still run when others have left or stopped."""


class Ignored:
    """Ignores all comms."""

    is_live = False

    def receive(self, engine: str, batch: CommBatch) -> None:
        pass

    def ended(self, engine: str) -> None:
        pass

    def send_waiting(self) -> None:
        pass

    def keep(self, engines: Set[str]) -> None:
        pass


IGNORED = Ignored()
