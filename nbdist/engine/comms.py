"""Sends the notebook what widgets on this rank say, and runs their callbacks.

A comm connects a widget on this rank with its model in the notebook's front end. The
messages of all comms are collected and sent at most ten times a second, with a widget's
updates merged, so that a loop that updates a widget is not slowed. Many widgets, or
many ranks, send less often. A comm is opened at once, because the display of its widget
may follow.
"""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import comm
from comm.base_comm import BaseComm
from jupyter_client.session import json_packer, json_unpacker

from nbdist.engine.rank import this_rank
from nbdist.ipc.comm_queue import CommQueue
from nbdist.ipc.locks import Event
from nbdist.wire import CommMessage

__all__ = ["flush", "install", "is_in_callback", "receive"]

PERIOD_S = 0.1
"""The shortest time, in seconds, between two batches of updates."""
MOST_PER_S = 500
"""Messages a second of all ranks together. Jupyter's server drops messages of a kernel
that sends more than 1000."""
PLAIN = (bool, int, str, type(None))

Send = Callable[[tuple[CommMessage, ...]], None]

_outbox: _Outbox | None = None
_is_in_callback = False


def install(send: Send) -> None:
    """Send the messages of all comms of this process with `send`.

    Args:
        send: Called by any thread, one at a time.
    """
    global _outbox
    _outbox = _Outbox(send)
    comm.create_comm = _RankComm


def flush() -> None:
    """Send all messages so far."""
    if _outbox is not None:
        _outbox.flush()


def is_in_callback() -> bool:
    """Whether the main thread runs callbacks of widgets."""
    return _is_in_callback


def receive(messages: tuple[CommMessage, ...]) -> None:
    """Take messages of the front end, and run the callbacks of their widgets.

    An interrupt ends the callback that runs, and drops the messages after it.
    """
    global _is_in_callback
    rank = this_rank()
    manager = comm.get_comm_manager()
    with rank.output.during("a widget"):
        _is_in_callback = True
        try:
            for message in messages:
                handle = getattr(manager, message.kind)
                with rank.interrupts.armed():
                    handle(None, "", _as_received(message))
        except KeyboardInterrupt:
            print("the callback of a widget was interrupted", file=sys.stderr)
        finally:
            _is_in_callback = False


def _as_received(message: CommMessage) -> dict[str, Any]:
    """A message as Jupyter's session makes it."""
    return {
        "header": {"msg_type": message.kind},
        "parent_header": {},
        "metadata": message.metadata,
        "content": {"comm_id": message.comm, "data": message.data},
        "buffers": [memoryview(buffer) for buffer in message.buffers],
    }


class _RankComm(BaseComm):
    """A comm whose messages the outbox sends."""

    def publish_msg(
        self,
        msg_type: str,
        data: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        buffers: list[bytes] | None = None,
        **keys: Any,
    ) -> None:
        """Queue a message: a copy of its data, which the caller may change."""
        data = data or {}
        # The notebook echoes the front end's updates, also while this rank is busy.
        if data.get("method") == "echo_update":
            return
        message = CommMessage(
            msg_type,
            self.comm_id,
            {key: _plain(value) for key, value in data.items()},
            _plain(metadata or {}),
            tuple(bytes(buffer) for buffer in buffers or ()),
            keys.get("target_name") or "",
        )
        assert _outbox is not None
        _outbox.put(message)


def _plain(value: Any) -> Any:
    """A copy that consists of values that JSON has.

    Raises:
        TypeError, ValueError: The value cannot be sent.
    """
    if type(value) in PLAIN or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _plain(each) for key, each in value.items()}
    return json_unpacker(json_packer(value))


class _Outbox:
    """Messages that this process sends in batches."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pid = os.getpid()
        self._queue = CommQueue()
        self._sending = threading.RLock()
        # Its `put` may be called in a destructor, unlike the methods of an Event.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._woken = False
        self._thread: threading.Thread | None = None

    def put(self, message: CommMessage) -> None:
        if os.getpid() != self._pid:
            return  # a forked child, such as a loader's worker
        self._queue.put(message)
        if message.kind == "comm_open":
            self.flush()
        elif not self._woken:
            self._woken = True
            if self._thread is None:
                self._start()
            self._wake.put(None)

    def flush(self) -> int:
        """Send all messages. Returns their number."""
        with self._sending:
            messages = self._queue.take()
            if messages:
                self._send(messages)
        return len(messages)

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=self._run, name="nbdist-comms", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        pause = Event()
        while True:
            self._wake.get()
            self._woken = False
            share_per_s = MOST_PER_S / this_rank().info.world_size
            pause.wait(max(PERIOD_S, self.flush() / share_per_s))
