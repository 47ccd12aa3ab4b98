"""The notebook's end of the messages, with a controller and without ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.cluster.ipp_client import IppClient
from nbdist.cluster.startup import _is_written
from nbdist.ipc import endpoints
from tests.processes import wait_until

WITHIN_S = 30.0


def started(run_dir: Path) -> subprocess.Popen[bytes]:
    """A controller that has written its files."""
    run_dir.mkdir(mode=0o700)
    controller = subprocess.Popen(
        [sys.executable, "-m", "nbdist.cluster.ipcontroller", str(run_dir)]
    )
    wait_until(lambda: _is_written(connection_file(run_dir)), WITHIN_S)
    return controller


def connection_file(run_dir: Path) -> Path:
    return run_dir / "security" / "ipcontroller-client.json"


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    made = started(tmp_path / "run")
    yield made
    made.kill()
    made.wait()


def events() -> int:
    """The number of eventfds of this process; each of zmq's sockets has one."""
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
