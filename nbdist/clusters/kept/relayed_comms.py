"""Passes the messages of the ranks' widgets on to a notebook."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from nbdist.clusters.kept.messages import Comms, CommsEnded, CommsKept
from nbdist.clusters.kept.peer import Peer
from nbdist.ipc.comm_queue import CommQueue
from nbdist.wire import CommBatch, CommMessage

__all__ = ["RelayedComms"]


@dataclass
class _OpenComm:
    """A comm of a rank, for a notebook that attaches later."""

    engine: str
    rank: int
    opened: CommMessage
    updates: CommQueue = field(default_factory=CommQueue)
    """All updates since then, which it makes one."""

    @property
    def messages(self) -> Iterable[CommMessage]:
        """What opens it in its present state."""
        later = self.updates.take()
        for message in later:
            self.updates.put(message)
        return self.opened, *later


class RelayedComms:
    """A `CommReceiver` in the server. It keeps the state of the widgets that are open.

    Args:
        is_live: Whether the notebook that has started the ranks shows widgets.
    """

    def __init__(self, *, is_live: bool) -> None:
        self.is_live = is_live
        self._lock = threading.Lock()
        self._open: dict[str, _OpenComm] = {}
        """By the comm's id, in the order of their opening."""
        self._peer: Peer | None = None
        """The notebook that shows the widgets."""

    def show_in(self, peer: Peer) -> None:
        """Send a notebook the widgets that are open, and what becomes of them."""
        with self._lock:
            self._peer = peer
            for each in self._open.values():
                batch = CommBatch(each.rank, tuple(each.messages))
                peer.send(Comms(each.engine, batch))

    def leave(self, peer: Peer) -> None:
        """Send nothing more to a notebook."""
        with self._lock:
            if self._peer is peer:
                self._peer = None

    def receive(self, engine: str, batch: CommBatch) -> None:
        with self._lock:
            for message in batch.messages:
                if message.kind == "comm_open":
                    opened = _OpenComm(engine, batch.rank, message)
                    self._open[message.comm] = opened
                elif message.kind == "comm_close":
                    self._open.pop(message.comm, None)
            self._update(batch.messages)
            self._send(Comms(engine, batch))

    def changed_by_user(self, messages: Iterable[CommMessage]) -> None:
        """Note what a notebook sends to the widgets of the ranks."""
        with self._lock:
            self._update(messages)

    def ended(self, engine: str) -> None:
        with self._lock:
            self._drop({each.engine for each in self._open.values()} - {engine})
            self._send(CommsEnded(engine))

    def send_waiting(self) -> None:
        """Do nothing: the notebook has sent what the user has done."""

    def keep(self, engines: Set[str]) -> None:
        with self._lock:
            self._drop(engines)
            self._send(CommsKept(frozenset(engines)))

    def _drop(self, kept: Set[str]) -> None:
        """Forget the comms of all other engines."""
        self._open = {k: each for k, each in self._open.items() if each.engine in kept}

    def _update(self, messages: Iterable[CommMessage]) -> None:
        for message in messages:
            each = self._open.get(message.comm)
            is_update = message.data.get("method") == "update"
            if each is not None and message.kind == "comm_msg" and is_update:
                each.updates.put(message)

    def _send(self, message: object) -> None:
        if self._peer is not None:
            self._peer.send(message)
