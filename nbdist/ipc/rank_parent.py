"""A rank's parent process, which reports how the rank ends.

The MPI launcher starts this program. The program starts the rank, or has the rank host
fork it, and waits for its end. Then it writes the exit code to the exit report, because
no launcher reports the code to the notebook.

The MPI launcher knows the notebook's host alone. The parent of a rank on another host
has the rank started there, by another rank parent. It writes what the rank reports to
the files of this host, and ends with the rank, and the rank with it. So the launcher
does not depend on another host, whose end ends its ranks and no more.

If the exit code is not 0, this program ends itself by SIGKILL. Open MPI reports a
process that a signal has ended to the survivors. It does not report one that has ended
with an exit code, and the survivors would wait for it forever.

The program runs without Python's `site`, so that an environment in which the rank
cannot start does not stop the program. The rank's error is then reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder that nbdist can be imported from."""

if __name__ == "__main__":
    # This file's folder would hide modules of the standard library.
    sys.path[0:1] = []
    sys.path.append(str(ROOT))

from nbdist.ipc.fork_messages import (  # noqa: E402
    FORK_TIMEOUT_S,
    FORKED,
    RANK_PARENT,
    SOCKET,
    STARTED,
    receive,
    request,
    send,
    socket_address,
)
from nbdist.ipc.host_sockets import HOST, connect  # noqa: E402
from nbdist.ipc.prctl import die_with_parent  # noqa: E402
from nbdist.ipc.process_files import Process  # noqa: E402

__all__ = ["command"]

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
OF_LAUNCHER = ("OMPI_", "PMIX_", "PRTE_")
"""The beginnings of the variables in which MPI's launcher tells a rank who it is."""
LAUNCHER_PORT = re.compile(r"tcp4://127\.0\.0\.1:(\d+)")
"""The address of MPI's launcher in these variables."""


def command(*arguments: str) -> list[str]:
    """The command line of a rank's parent, which the MPI launcher starts."""
    return [sys.executable, "-S", __file__, *arguments]


def main(arguments: list[str]) -> None:
    """Start the rank, wait until it has ended, and report its exit."""
    die_with_parent()
    process = Process.of_arguments(arguments)
    os.environ[RANK_PARENT] = str(os.getpid())
    process.report_stage("starting Python")
    if process.is_refused:
        os._exit(0)
    process.reserve_exit_report()
    host = _other_host(process)
    if host is not None:
        code = _follow_elsewhere(process, host, arguments)
    else:
        forked = _ask_for_rank(process, arguments)
        code = _own_rank(process, arguments) if forked is None else _follow(forked)
    process.report_exit(code)
    if code != 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


# -- a rank that this program starts -------------------------------------------------


def _own_rank(process: Process, arguments: list[str]) -> int:
    """Start the rank and wait for its end. Returns its exit code, -N for signal N."""
    child = os.fork()
    if child == 0:
        _become_rank(process, arguments)
    for signum in FORWARDED:
        signal.signal(signum, lambda number, _frame: _pass_on(child, number))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _become_rank(process: Process, arguments: list[str]) -> None:
    """Run the rank in this child, which ends with its parent."""
    die_with_parent()
    for number, descriptor in enumerate(_captured(process)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(ROOT)
    rank = [sys.executable, "-m", "nbdist.engine", *arguments]
    os.execv(sys.executable, rank)


def _captured(process: Process) -> list[int]:
    """Open the files that become a rank's descriptors 0, 1 and 2.

    Descriptor 0 is /dev/null. The other two are files, which also receive the output of
    C code and of child processes.
    """
    opened = [os.open(os.devnull, os.O_RDONLY)]
    for path in process.captured.values():
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        opened.append(os.open(path, flags, 0o600))
    return opened


def _pass_on(child: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signum)


# -- a rank that the rank host forks -------------------------------------------------


class _Forked:
    """A rank that is a child of the cluster's rank host.

    Args:
        handle: The rank's pidfd.
        host: The connection with the rank host, which sends the exit code. When it
            closes because this program ends, the rank is killed.
    """

    def __init__(self, handle: int, host: socket.socket) -> None:
        self.handle = handle
        self.host = host


def _ask_for_rank(process: Process, arguments: list[str]) -> _Forked | None:
    """Request the rank from the rank host; None if the rank was not forked.

    The variable `STARTED` then has the reason.
    """
    path = process.run_dir / SOCKET
    if not path.exists():
        return None
    os.environ[STARTED] = FORKED
    inherited = _inherited()
    host = socket.socket(socket.AF_UNIX)
    host.settimeout(FORK_TIMEOUT_S)
    try:
        with socket_address(path) as address:
            host.connect(address)
        descriptors = _captured(process)
        numbers = [*range(len(descriptors)), *inherited]
        message = request(arguments, folder=str(ROOT), descriptors=numbers)
        send(host, message, [*descriptors, *inherited])
        for descriptor in descriptors:
            os.close(descriptor)
        received = receive(host, descriptors=1)
    except OSError as error:
        os.environ[STARTED] = f"the fork server does not answer: {error}"
        return None
    if received is None or "refused" in received[0]:
        why = received[0]["refused"] if received else "the fork server has ended"
        os.environ[STARTED] = why
        return None
    host.settimeout(None)
    return _Forked(received[1][0], host)


def _inherited() -> list[int]:
    """The inheritable descriptors above 2, such as MPICH's PMI_FD."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def _follow(rank: _Forked) -> int:
    """Wait for the end of a forked rank. Returns its exit code, -N for signal N."""
    for signum in FORWARDED:
        signal.signal(signum, lambda number, _: _pass_on_to(rank.handle, number))
    try:
        ended = receive(rank.host)
    except OSError:
        ended = None
    # Without an answer, the rank host has died, and the rank with it.
    return int(ended[0]["code"]) if ended else -signal.SIGKILL


def _pass_on_to(handle: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signum)


# -- a rank on another host ----------------------------------------------------------


def _other_host(process: Process) -> str | None:
    """The name of the rank's host; None if it is this host."""
    here = os.environ.get(HOST)
    if here is None:
        return None
    from nbdist.ipc.device_assignment import read_text

    host: str = json.loads(read_text(process.run_dir))[process.rank]["host"]
    return None if host == here else host


def _follow_elsewhere(process: Process, host: str, arguments: list[str]) -> int:
    """Have the rank started on its host, and wait for its end.

    Returns:
        Its exit code, -N for signal N; that of SIGKILL if the host was lost.
    """
    from nbdist.ipc.device_assignment import read_text

    variables = {k: v for k, v in os.environ.items() if k.startswith(OF_LAUNCHER)}
    ports = {int(n) for v in variables.values() for n in LAUNCHER_PORT.findall(v)}
    message = {
        "arguments": arguments,
        "environment": variables,
        "assignments": read_text(process.run_dir),
        "pid": os.getpid(),
    }
    try:
        with connect(process.run_dir, host, "rank", sorted(ports)) as channel:
            send(channel, message)
            for signum in FORWARDED:
                signal.signal(signum, lambda n, _: send(channel, {"signal": n}))
            while (received := receive(channel)) is not None:
                ((kind, value),) = received[0].items()
                if kind == "code":
                    return int(value)
                if kind == "stage":
                    process.report_stage(value)
                else:
                    process.report_text(kind, value)
    except OSError:
        pass
    return -signal.SIGKILL


if __name__ == "__main__":
    main(sys.argv[1:])
