"""Ports: finds free ones, and limits who may connect to those of Open MPI."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence

from nbdist.ipc.host_sockets import ADDRESS, ADDRESSES

__all__ = [
    "addresses_of_hosts",
    "confine",
    "cut_off",
    "free_ports",
    "limit_sources",
    "may_limit_sources",
    "own_address",
    "set_addresses_of_hosts",
]

PIDFD_GETFD = 438
"""The number of that system call, the same on every architecture."""
SO_ATTACH_FILTER = 26
LOAD, EQUAL, SHIFTED, RETURN = 0x20, 0x15, 0x74, 0x06
"""Instructions of the classic Berkeley Packet Filter: load a word of the packet, jump
if it is equal, shift it to the right, and return the bytes of the packet to keep."""
NETWORK_HEADER = 0xFFF00000
"""The offset at which Linux shows a filter the IP header, as SKF_NET_OFF."""
SOURCE = 12
"""The offset of the source address in an IPv4 header."""
ALL = 0xFFFFFFFF


def own_address() -> str:
    """The address by which ranks on other hosts reach this host."""
    address = os.environ.get(ADDRESS)
    if address:
        return address
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # the host does not know its own name
        return "127.0.0.1"


def addresses_of_hosts() -> list[str]:
    """The addresses of the hosts of the ranks; [] if all are on one host."""
    return list(filter(None, os.environ.get(ADDRESSES, "").split(",")))


def set_addresses_of_hosts(addresses: Iterable[str]) -> None:
    """Set what `addresses_of_hosts` returns in this process."""
    os.environ[ADDRESSES] = ",".join(sorted(addresses))


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Different ports of an address of this host on which no process listens now."""
    with contextlib.ExitStack() as stack:  # open all at once, so that they differ
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((address, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def confine(pid: int, sources: Sequence[str] = ()) -> None:
    """Let only some hosts connect to the ports of a process.

    Open MPI binds its ports to every address, and has no option to prevent this. Since
    Linux 5.7, any user may bind an open socket to an interface, and on most systems
    attach a filter to it. Other users of the same hosts are not refused. If the system
    forbids it, the ports do not change.

    Args:
        pid: This process, or a process whose descriptors this process may copy. For an
            ordinary user that is one of its descendants.
        sources: The IPv4 addresses of the hosts. Without any, the ports are bound to
            the loopback interface.
    """
    # Systems other than Linux have no such folder, and the process may have ended.
    with contextlib.suppress(OSError):
        folder = f"/proc/{pid}/fd"
        for name in os.listdir(folder):
            # A container may forbid it, and a descriptor may be closed meanwhile.
            with contextlib.suppress(AttributeError, OSError):
                if os.readlink(f"{folder}/{name}").startswith("socket:"):
                    _confine_one(pid, int(name), sources)


def _confine_one(pid: int, fd: int, sources: Sequence[str]) -> None:
    with _socket_of(pid, fd) as copy:
        if not _is_reachable(copy):
            return
        if pid == os.getpid():
            # Programs that a cell starts do not need it.
            os.set_inheritable(fd, False)
        if sources and copy.family == socket.AF_INET:
            limit_sources(copy, sources)
        else:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")


def _is_reachable(sock: socket.socket) -> bool:
    """Whether a socket listens on an address that is not a loopback address."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    return not ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def may_limit_sources() -> bool:
    """Whether the system lets this user do what `limit_sources` does."""
    with socket.socket() as probe:
        return limit_sources(probe, ["127.0.0.1"])


def limit_sources(listener: socket.socket, sources: Sequence[str]) -> bool:
    """Drop what arrives at an IPv4 socket from other addresses than these and loopback.

    The packets that open a connection are dropped too, as if nothing listened.

    Args:
        listener: The socket.
        sources: The addresses. Without any, nothing changes.

    Returns:
        False if the system forbids it; nothing has changed then. Some want
        CAP_NET_ADMIN for it.
    """
    if not sources:
        return True
    program = [(LOAD, 0, 0, NETWORK_HEADER + SOURCE)]
    for source in sources:
        program += _accept_if(int(ipaddress.IPv4Address(source)))
    program += [(SHIFTED, 0, 0, 24), *_accept_if(127), (RETURN, 0, 0, 0)]
    packed = b"".join(struct.pack("HBBI", *each) for each in program)
    memory = ctypes.create_string_buffer(packed)
    filters = struct.pack("HP", len(program), ctypes.addressof(memory))
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filters)
    except OSError:
        return False
    return True


def _accept_if(value: int) -> list[tuple[int, int, int, int]]:
    """Keep the packet if the loaded word is equal, else skip one instruction."""
    return [(EQUAL, 0, 1, value), (RETURN, 0, 0, ALL)]


def cut_off(addresses: Collection[str]) -> None:
    """End this process's TCP connections with some hosts. Any thread may call.

    What a lost host has sent may arrive when its link is restored, from processes that
    have ended. Open MPI would take it for messages of the ranks that have joined since.
    """
    if not addresses:
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as end:
                    if end.family == socket.AF_INET and _peer(end) in addresses:
                        end.shutdown(socket.SHUT_RDWR)


def is_of_another_user(connection: socket.socket) -> bool:
    """Whether the process at the other end, on this host, is another user's.

    Args:
        connection: An IPv4 connection over loopback. False where the system does not
            list such connections.
    """
    ends = [_listed(connection.getpeername()), _listed(connection.getsockname())]
    try:
        with open("/proc/net/tcp") as table:
            rows = [line.split() for line in table]
    except OSError:
        return False
    users = [int(row[7]) for row in rows if row[1:3] == ends]
    return any(user != os.geteuid() for user in users)


def _listed(address: tuple[str, int]) -> str:
    """An address as the kernel's table has it, such as "0100007F:1F90"."""
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"


def _peer(end: socket.socket) -> str:
    """The address of the host at the other end."""
    address: str = end.getpeername()[0]
    return address


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
