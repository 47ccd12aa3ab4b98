"""The link to another host: the process that holds the stream to the host's agent.

`python -m nbdist.clusters.hosts.link RUN_DIR HOST SECONDS COMMAND...` runs COMMAND,
which starts the agent and connects its standard input and output with this process,
such as `ssh HOST python -m nbdist.clusters.hosts.agent`. When the agent answers, this
process listens on a Unix socket in the cluster's run folder, to which the notebook and
the rank parents connect. Each connection becomes a channel to the agent. The agent in
turn opens channels to the controller's sockets in the run folder, and to the ports that
a rank parent has named. Nothing else is reachable from the other host.

When the stream ends, or was silent for SECONDS, this process writes the reason to a
file, closes all channels and ends. The host's ranks are lost then. The process
supervisor starts this process, and ends it with the cluster.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from nbdist.ipc.atomic_files import write_atomically
from nbdist.ipc.channels import Channels
from nbdist.ipc.fork_messages import peer_user, receive, socket_address
from nbdist.ipc.host_sockets import ANSWERED, GREETING, link_socket, lost_file
from nbdist.ipc.prctl import die_with_parent, name_process

__all__ = ["main"]

MOST_NOISE_BYTES = 1 << 16
"""The most bytes that the other host's shell may print before the agent begins."""
OPENING_TIMEOUT_S = 5.0
"""Seconds in which a client says what it wants."""
END_TIMEOUT_S = 2.0
CONTROLLER_SOCKET = re.compile(r"zmq:\d+")


class Link:
    """The stream to one host.

    Args:
        run_dir: The cluster's run folder on this host.
        host: The name of the other host.
        shell: The process whose standard input and output are the stream.
        timeout_s: Seconds of silence after which the host is lost.
    """

    def __init__(
        self,
        run_dir: Path,
        host: str,
        shell: subprocess.Popen[bytes],
        timeout_s: float,
    ) -> None:
        assert shell.stdin is not None
        assert shell.stdout is not None
        self._run_dir, self._host = run_dir, host
        self._ports: set[int] = set()
        """The ports of this host that the other host may connect to."""
        self._channels = Channels(
            os.dup(shell.stdout.fileno()),
            os.dup(shell.stdin.fileno()),
            self._accept,
            is_first=True,
            timeout_s=timeout_s,
        )
        shell.stdin.close()
        shell.stdout.close()

    def run(self) -> None:
        """Serve until the stream ends, and tell why it has."""
        listener = socket.socket(socket.AF_UNIX)
        with socket_address(link_socket(self._run_dir, self._host)) as address:
            listener.bind(address)
        listener.listen(socket.SOMAXCONN)
        self._channels.listen(listener, self._take)
        signal.signal(signal.SIGTERM, lambda *_: self._end_soon())
        why = self._channels.run()
        with contextlib.suppress(OSError):  # the cluster has ended
            # Before the channels close, because their ends ask for the reason.
            write_atomically(
                lost_file(self._run_dir, self._host),
                lambda file: file.write(why.encode()),
                mode=0o600,
                durable=False,
            )
            link_socket(self._run_dir, self._host).unlink()
        self._channels.close()

    def _end_soon(self) -> None:
        self._channels.call_soon(lambda: self._channels.end("the cluster has ended"))

    def _take(self, connection: socket.socket) -> None:
        """Make a channel of a client's connection."""
        if peer_user(connection) != os.geteuid():
            connection.close()
            return
        connection.settimeout(OPENING_TIMEOUT_S)
        try:
            received = receive(connection)
        except OSError:
            received = None
        if received is None:
            connection.close()
            return
        wanted, _ = received
        self._ports.update(wanted.get("ports", ()))
        self._channels.open(wanted["open"], connection)

    def _accept(self, name: str) -> socket.socket:
        """Connect to what the other host asks for."""
        kind, _, number = name.partition(":")
        if CONTROLLER_SOCKET.fullmatch(name):
            connection = socket.socket(socket.AF_UNIX)
            with socket_address(self._run_dir / name) as address:
                connection.connect(address)
            return connection
        if kind == "port" and number.isdigit() and int(number) in self._ports:
            return socket.create_connection(("127.0.0.1", int(number)), 2.0)
        raise ConnectionRefusedError(name)


def _await_agent(shell: subprocess.Popen[bytes]) -> str:
    """Wait until the agent has begun. Returns why it has not, or ""."""
    assert shell.stdout is not None
    seen = b""
    while GREETING not in seen:
        # Byte by byte, because what follows belongs to the stream.
        byte = os.read(shell.stdout.fileno(), 1)
        if not byte:
            sys.stderr.write(seen.decode("utf-8", "replace"))
            return "it has ended before it answered"
        seen += byte
        if len(seen) > MOST_NOISE_BYTES:
            sys.stderr.write(seen[-1000:].decode("utf-8", "replace"))
            return "its shell prints other things than the agent's answer"
    return ""


def main() -> None:
    """Hold the stream until it ends."""
    run_dir, host, seconds, *command = sys.argv[1:]
    name_process(f"nbdist link to {host}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shell = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    )
    why = _await_agent(shell)
    if why:
        sys.exit(_ended(shell) or 1)
    print(ANSWERED, file=sys.stderr, flush=True)
    Link(Path(run_dir), host, shell, float(seconds)).run()
    _ended(shell)


def _ended(shell: subprocess.Popen[bytes]) -> int:
    """End the shell. Returns its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return shell.wait(END_TIMEOUT_S)
    shell.kill()
    return shell.wait()


if __name__ == "__main__":
    main()
