"""The notebook's client, with a controller and without ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nbdist.cluster.ipcontroller import Controller
from nbdist.cluster.ipp_client import IppClient
from nbdist.ipc import endpoints
from tests.processes import wait_until

WITHIN_S = 30.0


def started(run_dir: Path) -> subprocess.Popen[bytes]:
    """Start a controller, and wait until it has written its files."""
    run_dir.mkdir(mode=0o700)
    controller = subprocess.Popen(
        [sys.executable, "-m", "nbdist.cluster.ipcontroller", str(run_dir)]
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
    client = IppClient(connection_file(tmp_path / "run"), print)
    names = [name for name in client._client.trait_names() if name.endswith("_socket")]
    without_sockets = events() - len(names)
    controller.kill()
    controller.wait()
    taken = threading.Event()
    client._client._mux_stream.on_send(lambda *_: taken.set())
    client.send("nobody", endpoints.STATUS)
    assert taken.wait(WITHIN_S)  # by the socket, for a controller that may come back
    client.close()
    wait_until(lambda: events() <= without_sockets, 5.0, lambda: f"{events()} are left")
