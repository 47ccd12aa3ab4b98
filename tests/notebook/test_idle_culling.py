"""A server that ends idle kernels, with no page open while the ranks train."""

from __future__ import annotations

import json
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from tests.jupyterlab_driver import LabServer
from tests.notebook.test_kernel import Notebook
from tests.processes import wait_until

IDLE_S = 10
"""The server ends a kernel that is idle for longer, or takes longer to start."""
LOAD = """import nbdist
from nbdist.widgets import kernel_activity
kernel_activity.PERIOD_S = 0.5
%load_ext nbdist"""
CELL = "%%distributed -b\n{}"
CALL = "future = nbdist.cluster().execute({!r}, wait=False)"


class CullingServer(LabServer):
    """A server that looks each second for idle kernels, and ends them."""

    def __init__(self) -> None:
        super().__init__()
        wait_until(self._listens)  # it does so after it has printed its address

    def _command(self) -> list[str]:
        cull = "--MappingKernelManager.cull"
        return [
            *super()._command(),
            f"{cull}_idle_timeout={IDLE_S}",
            f"{cull}_interval=1",
        ]

    def _listens(self) -> bool:
        try:
            return bool(self.ask("status"))
        except urllib.error.URLError:
            return False

    def ask(self, path: str, method: str = "GET") -> Any:
        """What the REST API answers. The request is no activity."""
        url = f"{self.url}/api/{path}?no_track_activity=1"
        request = urllib.request.Request(url, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def last_activity(self, path: str) -> datetime:
        return datetime.fromisoformat(self.ask(path)["last_activity"].rstrip("Z"))

    def was_active_after(self, path: str, moment: datetime) -> bool:
        return self.last_activity(path) > moment

    def has_culled(self, kernel: str) -> bool:
        return any("Culling" in line and kernel in line for line in self.log)


class ServedNotebook(Notebook):
    """A kernel of a server, which does not know of the client that is connected."""

    def __init__(self, server: CullingServer) -> None:
        self.id = server.ask("kernels", "POST")["id"]
        file = server.home / "jupyter_runtime_dir" / f"kernel-{self.id}.json"
        self.client = BlockingKernelClient(connection_file=str(file))
        self.client.load_connection_file()
        self.client.start_channels(hb=False)
        wait_until(self._hears)
        self.run(LOAD)

    def close(self) -> None:
        self.client.stop_channels()

    def _hears(self) -> bool:
        self.client.kernel_info()
        try:
            return bool(self.client.get_iopub_msg(timeout=1))
        except queue.Empty:
            return False

    def messages_for(self, seconds: float) -> list[dict[str, Any]]:
        """The messages that the kernel publishes in this time, of which it has many."""
        messages, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            messages.append(self.client.get_iopub_msg(timeout=IDLE_S))
        return messages


@pytest.fixture(scope="module")
def server() -> Iterator[CullingServer]:
    server = CullingServer()
    yield server
    server.close()


def train(
    server: CullingServer, start: str, how: str, folder: Path
) -> list[dict[str, Any]]:
    """Train for longer than a kernel may be idle, and see the kernel end afterwards.

    Args:
        server: The server.
        start: The magic that starts the ranks.
        how: A cell that trains in the background, without what the ranks run.
        folder: An empty folder.

    Returns:
        What the kernel has published meanwhile.
    """
    end = folder / "end"
    code = (
        f"import pathlib, time\nwhile not pathlib.Path({str(end)!r}).exists():\n"
        "    time.sleep(0.1)\ntrained = 41 + rank"
    )
    with closing(ServedNotebook(server)) as notebook:
        assert notebook.run(start).status == "ok"
        assert notebook.run(how.format(code)).status == "ok"
        notebook.client.kernel_info()  # as a page does that is loaded
        paths = [f"kernels/{notebook.id}", "status"]  # the hub goes by the second
        begun = [server.last_activity(path) for path in paths]
        messages = notebook.messages_for(IDLE_S + 3)
        for path, before in zip(paths, begun, strict=True):
            later = before + timedelta(seconds=IDLE_S)
            wait_until(partial(server.was_active_after, path, later))
        end.touch()
        wait_until(partial(server.has_culled, notebook.id))
    return messages


def test_a_kernel_lives_while_a_silent_call_runs_and_no_longer(
    server: CullingServer, tmp_path: Path
):
    """The ranks are kept, so that they outlive the kernel."""
    start = "%dist_start -n 1 --device cpu --keep 0.1 --name culled"
    for message in train(server, start, CALL, tmp_path):
        if message["parent_header"].get("msg_type") != "kernel_info_request":
            assert message["msg_type"] == "nbdist_activity"
            assert not message["parent_header"]  # it belongs to no cell
    with closing(ServedNotebook(server)) as notebook:
        assert "attached to culled: 1 rank" in notebook.run("%dist_attach").text
        assert "41" in notebook.run("%dist_inspect trained").text
        notebook.run("%dist_stop")


def test_a_kernel_lives_while_a_cell_runs_in_the_background_and_no_longer(
    server: CullingServer, tmp_path: Path
):
    # Its line of status is activity too, but only in ipykernel 7.
    messages = train(server, "%dist_start -n 1 --device cpu", CELL, tmp_path)
    assert "nbdist_activity" in {message["msg_type"] for message in messages}
