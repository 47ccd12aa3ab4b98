"""The widgets that ranks have made, as widgets of the notebook's kernel.

A widget on a rank has a counterpart here. What the user does with it is passed on to
the rank, which runs the widget's callbacks as soon as its main thread is free.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, Protocol

from nbdist.ipc.comm_queue import CommQueue
from nbdist.ipc.locks import Future
from nbdist.widgets.widget_text import text_of
from nbdist.wire import CommBatch, CommMessage

if TYPE_CHECKING:
    from nbdist.widgets.rank_widget import Counterpart, RankWidget

__all__ = ["OutputPlace", "RankWidgets", "Send"]

REFERENCE = "IPY_MODEL_"
"""What precedes the id of a widget in the state of another widget."""

Message = dict[str, Any]
Send = Callable[
    [str, tuple[CommMessage, ...], Callable[[Message], None]],
    "Future[Any] | None",
]
"""Sends an engine messages, and calls back with each output of its callbacks. Returns
what is resolved when the callbacks have ended; None if nothing was sent."""


class OutputPlace(Protocol):
    """Shows what the callbacks of a widget print and display."""

    def owns(self, comm: str) -> bool:
        """Whether this widget is displayed here."""

    def take_output(self, rank: int, message: Message | None) -> None:
        """Show an output; None is the end of the callbacks."""

    def release(self, engine: str) -> None:
        """Replace the widgets of an engine that has ended by their texts."""

    def close(self) -> None:
        """Replace all widgets, and what surrounds them, by their texts."""


class RankWidgets:
    """Receives the messages of the ranks' comms, as a `clusters.CommReceiver`.

    Args:
        send: Sends an engine the messages of the front end.
    """

    is_live = True

    def __init__(self, send: Send) -> None:
        self._send = send
        # Messages arrive on the client's thread, and the user's in the main thread.
        self._lock = threading.RLock()
        self._widgets: dict[str, Counterpart] = {}
        self._outgoing: dict[str, _Outgoing] = {}
        self._ended: set[str] = set()
        self._places: list[OutputPlace] = []
        """Where widgets are displayed, in the order of their displays."""
        self._at_end: list[Callable[[], None]] = []

    def find(self, comm: str) -> RankWidget | None:
        """The widget with this id; None if there is none, or it is closed."""
        from nbdist.widgets.rank_widget import RankWidget

        with self._lock:
            widget = self._widgets.get(comm)
        return widget if isinstance(widget, RankWidget) else None

    def add_place(self, place: OutputPlace) -> None:
        """Have a place show the output of the callbacks of its widgets."""
        with self._lock:
            self._places.append(place)

    def at_end(self, close: Callable[[], None]) -> None:
        """Call a function when the cluster has stopped."""
        with self._lock:
            self._at_end.append(close)

    def receive(self, engine: str, batch: CommBatch) -> None:
        """Show what the widgets of an engine say."""
        with self._lock:
            if engine in self._ended:
                return
            for message in batch.messages:
                self._take(engine, batch.rank, message)

    def _take(self, engine: str, rank: int, message: CommMessage) -> None:
        if message.kind == "comm_open":
            forward = functools.partial(self._forward, engine, rank)
            # Slow to import, so only once there is a widget.
            from nbdist.widgets.rank_widget import counterpart

            opened = counterpart(engine, rank, message, forward)
            self._widgets[message.comm] = opened
            return
        widget = self._widgets.get(message.comm)
        if widget is None:
            return
        if message.kind == "comm_close":
            del self._widgets[message.comm]
            widget.close()
        else:
            widget.take(message)

    def ended(self, engine: str) -> None:
        """Replace the widgets of an engine by their texts."""
        with self._lock:
            self._ended.add(engine)
            self._outgoing.pop(engine, None)
            for place in self._places:
                place.release(engine)
            gone = [w for w in self._widgets.values() if w.engine == engine]
            for widget in gone:
                del self._widgets[widget.name]
        for widget in gone:
            widget.close()

    def send_waiting(self) -> None:
        """Send what the user has done so far, so that the next cell comes after it."""
        with self._lock:
            waiting = list(self._outgoing.values())
        for outgoing in waiting:
            outgoing.send_waiting()

    def keep(self, engines: Set[str]) -> None:
        """Replace the widgets of all other engines by their texts."""
        with self._lock:
            places = list(self._places)
            known = {widget.engine for widget in self._widgets.values()}
        if not engines:
            for place in places:
                place.close()
            self._places.clear()
            at_end, self._at_end = self._at_end, []
            for close in at_end:
                close()
        for engine in known - engines:
            self.ended(engine)

    def _forward(self, engine: str, rank: int, message: CommMessage) -> None:
        """Queue a message of the front end for a rank."""
        with self._lock:
            outgoing = self._outgoing.get(engine)
            if outgoing is None:
                outgoing = self._outgoing[engine] = _Outgoing(
                    functools.partial(self._send_now, engine, rank)
                )
        outgoing.put(message)

    def _send_now(
        self, engine: str, rank: int, messages: tuple[CommMessage, ...]
    ) -> Future[Any] | None:
        place = self._place_of(messages[0].comm)
        if place is None:
            return self._send(engine, messages, lambda _message: None)
        future = self._send(
            engine, messages, lambda message: place.take_output(rank, message)
        )
        if future is not None:
            future.add_done_callback(lambda _future: place.take_output(rank, None))
        return future

    def _place_of(self, comm: str) -> OutputPlace | None:
        """Where a widget was displayed last."""
        with self._lock:
            places = list(self._places)
        owner = (place for place in reversed(places) if place.owns(comm))
        return next(owner, places[-1] if places else None)

    def text_of(self, widget: RankWidget) -> str:
        """What a widget shows, as a text."""
        return text_of(widget.state, self._state_of)

    def _state_of(self, reference: object) -> Mapping[str, Any] | None:
        if not isinstance(reference, str) or not reference.startswith(REFERENCE):
            return None
        widget = self.find(reference.removeprefix(REFERENCE))
        return None if widget is None else widget.state

    def tree(self, comm: str) -> set[str]:
        """The ids of a widget and of all widgets to which it refers."""
        found: set[str] = set()
        waiting = [comm]
        while waiting:
            name = waiting.pop()
            widget = self.find(name)
            if name not in found and widget is not None:
                found.add(name)
                waiting += _references(widget.state)
        return found


class _Outgoing:
    """Sends an engine one request at a time. Messages wait for its reply, merged.

    A rank that is busy for long therefore gets the last value of a slider that was
    moved meanwhile, and not all of them.
    """

    def __init__(
        self, send: Callable[[tuple[CommMessage, ...]], Future[Any] | None]
    ) -> None:
        self._send = send
        self._queue = CommQueue()
        # Reentrant: a request may have been answered when it asks for a callback.
        self._lock = threading.RLock()
        self._is_sending = False

    def put(self, message: CommMessage) -> None:
        self._queue.put(message)
        with self._lock:
            if not self._is_sending:
                self._is_sending = True
                self._send_next()

    def send_waiting(self) -> None:
        """Send the messages that wait, also if the reply has not arrived."""
        with self._lock:
            if self._is_sending:
                self._send_next()

    def _send_next(self, _reply: object = None) -> None:
        with self._lock:
            messages = self._queue.take()
            if not messages:
                self._is_sending = False
                return
            future = self._send(messages)  # does not wait
        if future is not None:
            future.add_done_callback(self._send_next)


def _references(value: object) -> Iterator[str]:
    """The ids of the widgets to which a state refers."""
    if isinstance(value, str) and value.startswith(REFERENCE):
        yield value.removeprefix(REFERENCE)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)
