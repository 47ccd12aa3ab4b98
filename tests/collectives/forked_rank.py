"""Has this process's rank forked, and waits for its end.

`ranks.py` has mpiexec start this program in the place of a rank. The rank takes over
the environment and the output, and ends with this program.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    # This file's folder would hide modules of the standard library.
    sys.path[0:1] = []
    sys.path.append(str(ROOT))

from nbdist.ipc.fork_messages import receive, request, send, socket_address  # noqa: E402
from nbdist.ipc.prctl import die_with_parent  # noqa: E402

STREAMS = [0, 1, 2]


def main(path: str, module: str, *arguments: str) -> None:
    """Have the rank host at a socket fork a rank, and end as the rank ends."""
    die_with_parent()
    host = socket.socket(socket.AF_UNIX)
    with socket_address(Path(path)) as address:
        host.connect(address)
    send(host, request(list(arguments), module=module), STREAMS)
    answer = receive(host, descriptors=1)
    if answer is None or "pid" not in answer[0]:
        sys.exit(f"the rank was not forked: {answer}")
    ended = receive(host)
    code = int(ended[0]["code"]) if ended else -signal.SIGKILL
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
