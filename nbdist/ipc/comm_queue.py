"""Messages of comms that wait to be sent, with the updates of a widget merged."""

from __future__ import annotations

import threading
from typing import Any

from nbdist.wire import CommMessage

__all__ = ["CommQueue"]


class CommQueue:
    """A queue of comm messages, in which a widget's updates become one.

    The last value of each key remains. An update is never merged across a message that
    is no update, so that the order of these messages, and theirs to the updates, stays.
    Any thread may call, also in a destructor.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may run a destructor that puts a message.
        self._lock = threading.RLock()
        self._waiting: list[CommMessage | _Update] = []
        self._latest: dict[str, _Update] = {}
        """The updates since the last other message, by comm."""

    def put(self, message: CommMessage) -> None:
        """Add a message. Its data must not change afterwards."""
        with self._lock:
            if not _is_update(message):
                self._latest.clear()
                self._waiting.append(message)
                return
            update = self._latest.get(message.comm)
            if update is None:
                update = self._latest[message.comm] = _Update(message.comm)
                self._waiting.append(update)
            update.add(message)

    def take(self) -> tuple[CommMessage, ...]:
        """Remove and return all messages."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._latest.clear()
        return tuple(
            each.message() if isinstance(each, _Update) else each for each in waiting
        )


class _Update:
    """Values of a widget's state by key, with the buffers that belong to them."""

    def __init__(self, comm: str) -> None:
        self._comm = comm
        self._state: dict[str, Any] = {}
        self._buffers: dict[str, list[tuple[list[Any], bytes]]] = {}
        """For each key, the paths and the contents of its buffers."""

    def add(self, message: CommMessage) -> None:
        """Replace the values of a message's keys."""
        state = message.data["state"]
        paths = message.data.get("buffer_paths", [])
        # A key whose whole value is a buffer is missing in the state.
        for key in {*state, *(path[0] for path in paths)}:
            self._state.pop(key, None)
            self._buffers.pop(key, None)
        self._state.update(state)
        for path, buffer in zip(paths, message.buffers, strict=False):
            self._buffers.setdefault(path[0], []).append((path, buffer))

    def message(self) -> CommMessage:
        parts = [part for parts in self._buffers.values() for part in parts]
        data = {
            "method": "update",
            "state": self._state,
            "buffer_paths": [path for path, _buffer in parts],
        }
        buffers = tuple(buffer for _path, buffer in parts)
        return CommMessage("comm_msg", self._comm, data, {}, buffers)


def _is_update(message: CommMessage) -> bool:
    return (
        message.kind == "comm_msg"
        and not message.metadata
        and message.data.get("method") == "update"
        and message.data.keys() <= {"method", "state", "buffer_paths"}
        and isinstance(message.data.get("state"), dict)
    )
