"""The agent of a host: starts, watches and ends a cluster's ranks on that host.

`python -m nbdist.clusters.hosts.agent HOST SECONDS` serves the process at the other end
of its standard input and output, which is the cluster's link to this host. The agent
does for this host what the notebook does for its own: it has a run folder, a process
supervisor and a fork server. It never listens on an interface other than loopback.

The link opens two kinds of channels. On "ask", a request is answered; `Answers` has the
requests. On "rank", a rank parent of the notebook's host has a rank started, and is
told the rank's stages and its end. If that channel closes, the rank is ended.

The agent opens channels to the controller, which the ranks reach by sockets of the same
names in the run folder of this host, and to the launcher's port.

When the stream ends, or was silent for SECONDS, all processes of the cluster on this
host are ended, and its files are removed. In a step of Slurm, `job_step` keeps Slurm's
signals from the agent and its ranks; the notebook asks which have come.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial

from nbdist.clusters.hosts.answers import Answers
from nbdist.clusters.hosts.job_step import JobStep
from nbdist.clusters.hosts.local_world import LocalWorld
from nbdist.clusters.hosts.rank_service import serve_rank
from nbdist.ipc.channels import Channels
from nbdist.ipc.host_sockets import GREETING
from nbdist.ipc.ports import is_of_another_user
from nbdist.ipc.prctl import name_process

__all__ = ["main"]


class Agent:
    """Serves one stream.

    Args:
        host: The name of this host in the cluster's list.
        source, sink: The stream's descriptors.
        timeout_s: Seconds of silence after which the stream has been cut.
        step: The step of a job that the agent runs in.
    """

    def __init__(
        self, host: str, source: int, sink: int, timeout_s: float, step: JobStep
    ) -> None:
        self._channels = Channels(
            source, sink, self._accept, is_first=False, timeout_s=timeout_s
        )
        self._world = LocalWorld(host, self._relay, self.end_soon)
        self._services: dict[str, Callable[[socket.socket], None]] = {
            "ask": Answers(self._world, step).serve,
            "rank": partial(serve_rank, self._world),
        }
        step.watch(self._channels, self.end_soon)

    def run(self) -> None:
        """Serve until the stream ends, then end all that was started."""
        try:
            self._channels.run()
        finally:
            self._channels.close()
            self._world.close()

    def end_soon(self) -> None:
        """Have `run` return. A signal handler or any thread may call this."""
        self._channels.call_soon(lambda: self._channels.end("the agent was ended"))

    def _accept(self, name: str) -> socket.socket:
        """The loop's end of a channel that is served here."""
        serve = self._services.get(name)
        if serve is None:
            raise ConnectionRefusedError(name)
        here, there = socket.socketpair()

        def work() -> None:
            with there, contextlib.suppress(OSError):  # the other host has gone
                serve(there)

        threading.Thread(target=work, name=f"nbdist-{name}", daemon=True).start()
        return here

    def _relay(self, listener: socket.socket, channel: str) -> None:
        """Join each connection of a listening socket with a channel to the notebook."""

        def take(connection: socket.socket) -> None:
            is_port = connection.family == socket.AF_INET
            if is_port and is_of_another_user(connection):
                connection.close()
                return
            self._channels.open(channel, connection)

        self._channels.call_soon(lambda: self._channels.listen(listener, take))


def main() -> None:
    """Serve the link at standard input and output."""
    host, seconds = sys.argv[1:]
    step = JobStep()
    source, sink = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what other code prints must not be in the stream
    name_process(f"nbdist agent of {host}")
    agent = Agent(host, source, sink, float(seconds), step)
    os.write(sink, GREETING)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda *_: agent.end_soon())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent.run()


if __name__ == "__main__":
    main()
