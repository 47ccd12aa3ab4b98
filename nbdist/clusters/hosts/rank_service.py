"""Starts a rank for a rank parent of the notebook's host, and reports how it goes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from typing import Any

from nbdist.clusters.hosts.local_world import LocalWorld
from nbdist.clusters.startup_status import runs
from nbdist.ipc import pidfd
from nbdist.ipc.fork_messages import receive, send
from nbdist.ipc.process_files import (
    REGISTERING,
    Process,
    remove_cuda_files,
    stderr_of_cell,
)

__all__ = ["serve_rank"]

LOOK_S = 0.02
"""Seconds between two looks at the files of a rank that starts."""
LATER_LOOK_S = 1.0
EXIT_TIMEOUT_S = 5.0
"""Seconds from the end of a rank parent to the process supervisor's report."""
REPORTS = ("failed", "reason", "stderr")
"""The files that a rank leaves about its end."""
MOST_LETTERS = 100_000
"""The end of a file that is reported."""


def serve_rank(world: LocalWorld, channel: socket.socket) -> None:
    """Start one rank, and serve its rank parent until the rank has ended.

    Args:
        world: This host's part of the cluster.
        channel: The connection with the rank parent of the notebook's host.

    Raises:
        OSError: The connection is broken. The rank was ended.
    """
    received = receive(channel)
    if received is None:
        return
    request, _ = received
    process = world.start_rank(
        request["arguments"],
        request["environment"],
        request["assignments"],
        request["pid"],
    )
    try:
        _RankWatch(world, process, channel).run()
    finally:
        world.supervisor.stop([process.name])


class _RankWatch:
    """Tells a rank parent of the notebook's host what its rank does."""

    def __init__(
        self, world: LocalWorld, process: Process, channel: socket.socket
    ) -> None:
        self._world, self._process, self._channel = world, process, channel
        self._stage: dict[str, Any] = {}

    def run(self) -> None:
        """Watch until the rank or the connection has ended."""
        name, supervisor = self._process.name, self._world.supervisor
        supervisor.wait(lambda: supervisor.pid(name) is not None, EXIT_TIMEOUT_S)
        pid = supervisor.pid(name)
        assert pid is not None, f"{name} was not started"
        try:
            handle = pidfd.opened(pid)
        except ProcessLookupError:
            self._report_end()
            return
        try:
            while True:
                look_s = LATER_LOOK_S if self._is_up else LOOK_S
                watched: list[Any] = [self._channel]
                watched += [] if handle is None else [handle]
                ready, _, _ = select.select(watched, [], [], look_s)
                self._report_stage()
                if handle in ready or (handle is None and not runs(pid)):
                    self._report_end()
                    return
                if self._channel in ready and not self._pass_signal(pid):
                    return
        finally:
            if handle is not None:
                os.close(handle)

    @property
    def _is_up(self) -> bool:
        return self._stage.get("stage") == REGISTERING

    def _pass_signal(self, pid: int) -> bool:
        """Pass a signal on. Returns False if the connection has ended."""
        received = receive(self._channel)
        if received is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, received[0]["signal"])
        return True

    def _report_stage(self) -> None:
        stage = self._process.read_stage()
        if stage is not None and stage != self._stage:
            self._stage = stage
            send(self._channel, {"stage": stage["stage"]})

    def _report_end(self) -> None:
        """Report what the rank has said about its end, and its exit code."""
        name, supervisor = self._process.name, self._world.supervisor
        supervisor.wait(lambda: supervisor.exit_code(name) is not None, EXIT_TIMEOUT_S)
        for suffix in REPORTS:
            path = self._process.path(suffix)
            if path.exists():
                text = (
                    stderr_of_cell(self._process.run_dir, name)
                    if suffix == "stderr"
                    else path.read_text(errors="replace")
                )
                send(self._channel, {suffix: text[-MOST_LETTERS:]})
        if self._stage:
            remove_cuda_files(self._stage["pid"])
        code = self._process.read_exit_code()
        if code is None:
            code = supervisor.exit_code(name)
        send(self._channel, {"code": -signal.SIGKILL if code is None else code})
