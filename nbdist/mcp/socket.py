"""Serves on a Unix socket, in a folder that only this user can read."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from nbdist.clusters.kept.directory import names_folder
from nbdist.ipc.fork_messages import peer_user, socket_address
from nbdist.ipc.listening import Acceptor

__all__ = ["serve"]


def serve(options: Sequence[str]) -> None:
    """Serve each connection by a process of its own, until SIGINT or SIGTERM.

    The path of the socket is printed. Processes of other users are refused.

    Args:
        options: The command line's, without `--socket`.
    """
    path = names_folder() / f"mcp-{os.getpid()}.socket"
    served: list[subprocess.Popen[bytes]] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit())
    with socket.socket(socket.AF_UNIX) as listener:
        with socket_address(path) as address:
            listener.bind(address)
        try:
            listener.listen()
            print(path, flush=True)
            acceptor = Acceptor(listener)
            while True:
                connection = acceptor.accept()
                served = [each for each in served if each.poll() is None]
                if connection is None:
                    continue
                # No process may be free for it: the other end sees its end.
                with connection, contextlib.suppress(OSError):
                    if peer_user(connection) in (os.geteuid(), 0):
                        served.append(_server_of(connection, options))
        finally:
            path.unlink(missing_ok=True)
            for each in served:
                with contextlib.suppress(ProcessLookupError):
                    each.terminate()


def _server_of(
    connection: socket.socket, options: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start a server whose standard input and output are a connection."""
    command = [sys.executable, "-m", "nbdist.mcp", *options]
    end = connection.fileno()
    return subprocess.Popen(command, stdin=end, stdout=end)
