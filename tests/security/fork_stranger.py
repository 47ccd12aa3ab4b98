"""A program of another Unix user that asks a rank host for a process.

    python -m tests.security.fork_stranger UID SOCKET

Becomes that user, asks, and prints what it gets as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

from nbdist.ipc.fork_messages import receive, request, send, socket_address

TIMEOUT_S = 10.0


def main() -> None:
    """Ask, and report."""
    uid = int(sys.argv[1])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    got = None
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        with socket_address(Path(sys.argv[2])) as address:
            connection.connect(address)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send(connection, request([], folder="/"))
            got = receive(connection, descriptors=1)
    print(json.dumps(got), flush=True)


if __name__ == "__main__":
    main()
