"""The notebook's client, with a controller and without ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from ipyparallel.controller.heartmonitor import Heart

from nbdist.clusters.ipcontroller import Controller
from nbdist.clusters.ipp_client import IppClient
from nbdist.ipc import endpoints
from nbdist.ipc.signed_messages import SignedSession
from tests.processes import HANG_S, wait_until

WITHIN_S = 30.0
QUIET_MS = 500
"""ipyparallel's heart monitor would send several messages in this time."""


def started(run_dir: Path) -> subprocess.Popen[bytes]:
    """Start a controller, and wait until it has written its files."""
    run_dir.mkdir(mode=0o700)
    controller = subprocess.Popen(
        [sys.executable, "-m", "nbdist.clusters.ipcontroller", str(run_dir)]
    )
    wait_until(connection_file(run_dir).exists, WITHIN_S)
    return controller


def connection_file(run_dir: Path) -> Path:
    return run_dir / "security" / "ipcontroller-client.json"


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    made = started(tmp_path / "run")
    yield made
    made.kill()
    made.wait()


def test_a_connection_file_appears_complete(tmp_path: Path) -> None:
    """A rank that waits for the file reads it at once."""
    path = tmp_path / "ipcontroller-engine.json"
    path.write_text("what another reader has open")
    app = SimpleNamespace(profile_dir=SimpleNamespace(security_dir=str(tmp_path)))
    with path.open() as opened:
        Controller.save_connection_dict(app, path.name, {"key": "value"})
        assert opened.read() == "what another reader has open", "it was replaced"
    assert json.loads(path.read_text()) == {"key": "value"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert [*tmp_path.iterdir()] == [path]


def events() -> int:
    """The number of eventfds of this process. Each socket of zmq has one."""
    paths = Path("/proc/self/fd").iterdir()
    return sum(p.is_symlink() and "eventfd" in os.readlink(p) for p in paths)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_client_whose_controller_was_killed_leaves_no_socket(
    controller: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    client = IppClient(connection_file(tmp_path / "run"), print, 30)
    names = [name for name in client._client.trait_names() if name.endswith("_socket")]
    without_sockets = events() - len(names)
    controller.kill()
    controller.wait()
    taken = threading.Event()
    client._client._mux_stream.on_send(lambda *_: taken.set())
    client.send("no engine", endpoints.STATUS)
    assert taken.wait(WITHIN_S)  # by the socket, for a controller that may come back
    client.close()
    wait_until(
        lambda: events() <= without_sockets, HANG_S, lambda: f"{events()} are left"
    )


class Engine:
    """The part of an engine that registers with a controller."""

    def __init__(self, run_dir: Path) -> None:
        text = (run_dir / "security" / "ipcontroller-engine.json").read_text()
        self._info: dict[str, Any] = json.loads(text)
        self._context = zmq.Context()
        self.session = SignedSession(key=self._info["key"].encode())
        self.uuid = self.session.session

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._context.destroy(linger=0)

    def url(self, channel: str) -> str:
        return f"{self._info['interface']}:{self._info[channel]}"

    def request_registration(self) -> None:
        with self._context.socket(zmq.DEALER) as query:
            query.identity = self.uuid.encode()
            query.rcvtimeo = int(WITHIN_S * 1000)
            query.connect(self.url("registration"))
            content = {"uuid": self.uuid}
            self.session.send(query, "registration_request", content=content)
            _, reply = self.session.recv(query, mode=0)
            assert reply["content"]["status"] == "ok"

    def connect_heart(self) -> None:
        ends = self.url("hb_ping"), self.url("hb_pong")
        Heart(*ends, heart_id=self.uuid.encode()).start()

    def heartbeats(self) -> zmq.Socket[bytes]:
        """What hearts receive, from now on."""
        end = self._context.socket(zmq.SUB)
        end.subscribe(b"")
        end.connect(self.url("hb_ping"))
        return end


def test_an_engine_is_registered_when_its_heart_has_connected(
    controller: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    client = IppClient(connection_file(run_dir), print, 30)
    try:
        with Engine(run_dir) as first, Engine(run_dir) as second, ExitStack() as stack:
            beats = stack.enter_context(second.heartbeats())
            for number, engine in enumerate((first, second)):
                engine.request_registration()
                assert len(client.engines()) == number
                engine.connect_heart()
                wait_until(lambda n=number: len(client.engines()) == n + 1, WITHIN_S)
                assert client.engines()[number] == engine.uuid
            while beats.poll(QUIET_MS // 5):
                beats.recv()
            assert not beats.poll(QUIET_MS), "no engine comes"
    finally:
        client.close()


def test_an_engine_whose_notice_was_lost_is_found(
    controller: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    client, other = (IppClient(connection_file(run_dir), print, 30) for _ in range(2))
    try:
        client._client._notification_stream.on_recv(lambda _frames: None)
        with Engine(run_dir) as engine:
            engine.request_registration()
            engine.connect_heart()
            wait_until(lambda: engine.uuid in other.engines().values(), WITHIN_S)
            assert client.engines() == {}
            told = threading.Event()
            with client.on_registration(told.set):
                client.ask_for_engines()
                assert told.wait(WITHIN_S)
            assert client.engines() == {0: engine.uuid}
    finally:
        client.close()
        other.close()
