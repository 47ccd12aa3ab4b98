"""What several threads use is read and changed by the one that holds the lock."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.clusters.kept.relayed_comms import RelayedComms
from nbdist.clusters.kept.server import Silent
from nbdist.clusters.supervisor_client import HelperWatch
from nbdist.ipc.comm_queue import CommQueue
from nbdist.telemetry.recorder import Recorder
from nbdist.wire import CommBatch, CommMessage, Mark
from tests.guarded import guarded

OPENING = CommMessage("comm_open", "a", {}, {}, ())
UPDATE = CommMessage("comm_msg", "a", {"method": "update", "state": {"x": 1}}, {}, ())
CLOSING = CommMessage("comm_close", "a", {}, {}, ())


def guard(owner: Any, *names: str) -> Any:
    for name in names:
        whole = guarded(getattr(owner, name), lambda: owner._lock)
        setattr(owner, name, whole)
    return owner


def queue() -> None:
    made = guard(CommQueue(), "_waiting", "_latest")
    for message in (UPDATE, OPENING, UPDATE, UPDATE):
        made.put(message)
    with made._lock:
        assert len(made._waiting) == 3


def silent_connections() -> None:
    made = guard(Silent(), "_connections")
    end, other = socket.socketpair()
    with Connection(end.detach()) as connection, other:
        made.add(connection)
        made.discard(connection)
        made.discard(connection)


def relayed_comms() -> None:
    made = guard(RelayedComms(is_live=True), "_open")
    sent: list[object] = []
    peer: Any = SimpleNamespace(send=sent.append)
    made.receive("e", CommBatch(0, (OPENING,)))
    made.show_in(peer)
    made.changed_by_user([UPDATE])
    made.receive("e", CommBatch(0, (CLOSING,)))
    made.ended("e")
    assert len(sent) == 3


def records() -> None:
    batches: list[Any] = []
    made = Recorder(0, batches.append)
    assert made.close(5)
    guard(made, "_buffer")
    made.record(Mark(0.0, "commit", "1"))
    made._publish_pending()
    assert len(batches) == 1


def helpers() -> None:
    made = guard(HelperWatch(lambda _: None), "_helpers")
    made.add("this process", os.getpid())
    made.discard("this process")
    made.close()


@pytest.mark.parametrize(
    "use", [queue, silent_connections, relayed_comms, records, helpers]
)
def test_everything_is_touched_with_the_lock(use: Callable[[], None]) -> None:
    use()
