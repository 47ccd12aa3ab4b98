"""The files and messages through which processes of this host reach another host.

Imports only the standard library, because a rank parent runs without `site`.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from nbdist.ipc.fork_messages import send, socket_address

__all__ = [
    "ADDRESS",
    "ADDRESSES",
    "ANSWERED",
    "GREETING",
    "HOST",
    "INTERFACE",
    "LAUNCHER_USER",
    "RANK_PROXY",
    "connect",
    "link_socket",
    "lost_file",
]

ANSWERED = "the agent has answered"
"""The line of a link's log after which the host is connected."""
GREETING = b"\0nbdist agent\n"
"""What the agent of a host writes first. The bytes before it are its shell's."""
HOST = "NBDIST_RANK_HOST"
"""Environment variable of a rank: the name of its host in the cluster's list. It is not
set if all ranks are on the notebook's host."""
ADDRESS = "NBDIST_RANK_ADDRESS"
"""Environment variable of a rank: its host's address in the network of the ranks."""
ADDRESSES = "NBDIST_RANK_ADDRESSES"
"""Environment variable of a rank: the addresses of all hosts, with commas."""
INTERFACE = "NBDIST_RANK_INTERFACE"
"""Environment variable of a rank: the interface with that address."""
LAUNCHER_USER = "NBDIST_LAUNCHER_USER"
"""Environment variable of a rank on another host: the id of the notebook's user there.
`collectives/_launchers_user.c` reads it."""
RANK_PROXY = "NBDIST_RANK_PROXY"
"""Environment variable of a rank on another host: the pid of the rank parent on the
notebook's host."""


def link_socket(run_dir: Path, host: str) -> Path:
    """The socket of the link to a host, in the run folder of the notebook's host."""
    return run_dir / f"host:{host}"


def lost_file(run_dir: Path, host: str) -> Path:
    """The file that says why the link to a host has ended."""
    return run_dir / f"host:{host}.lost"


def connect(
    run_dir: Path, host: str, channel: str, ports: Sequence[int] = ()
) -> socket.socket:
    """Open a channel to the agent of a host.

    Args:
        run_dir: The run folder of the notebook's host.
        host: The host.
        channel: The channel's name.
        ports: Ports of this host that the other host may connect to from now on.

    Raises:
        OSError: The host is not connected.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        with socket_address(link_socket(run_dir, host)) as address:
            connection.connect(address)
        send(connection, {"open": channel, "ports": list(ports)})
    except BaseException:
        connection.close()
        raise
    return connection
