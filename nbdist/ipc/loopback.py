"""Ports of the loopback interface: finds free ones, and moves Open MPI's there."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator

__all__ = ["confine", "free_ports"]

PIDFD_GETFD = 438
"""The number of that system call, the same on every architecture."""


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 on which no process listens now."""
    with contextlib.ExitStack() as stack:  # open all at once, so that they differ
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def confine(pid: int) -> None:
    """Bind the listening sockets of a process to the loopback interface.

    Open MPI binds its ports to every address, and has no option to prevent this. Since
    Linux 5.7, any user may bind an open socket to an interface. Other hosts are then
    refused, but not other users of this host. If the system forbids it, the ports do
    not change.

    Args:
        pid: This process, or a process whose descriptors this process may copy. For an
            ordinary user that is one of its descendants.
    """
    # Systems other than Linux have no such folder, and the process may have ended.
    with contextlib.suppress(OSError):
        folder = f"/proc/{pid}/fd"
        for name in os.listdir(folder):
            # A container may forbid it, and a descriptor may be closed meanwhile.
            with contextlib.suppress(AttributeError, OSError):
                if os.readlink(f"{folder}/{name}").startswith("socket:"):
                    _confine_one(pid, int(name))


def _confine_one(pid: int, fd: int) -> None:
    with _socket_of(pid, fd) as copy:
        if not _is_reachable(copy):
            return
        if pid == os.getpid():
            # Programs that a cell starts do not need it.
            os.set_inheritable(fd, False)
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")


def _is_reachable(sock: socket.socket) -> bool:
    """Whether a socket listens on an address that is not a loopback address."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    return not ipaddress.ip_address(sock.getsockname()[0]).is_loopback


@contextlib.contextmanager
def _socket_of(pid: int, fd: int) -> Iterator[socket.socket]:
    """A second descriptor of a socket of a process."""
    if pid == os.getpid():
        copy = os.dup(fd)
    else:
        process = os.pidfd_open(pid)
        try:
            copy = ctypes.CDLL(None, use_errno=True).syscall(
                PIDFD_GETFD, process, fd, 0
            )
        finally:
            os.close(process)
        if copy < 0:
            raise OSError(ctypes.get_errno(), f"descriptor {fd} of process {pid}")
    with socket.socket(fileno=copy) as shared:
        yield shared
