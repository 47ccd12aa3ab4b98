"""The addresses of this host, and whether other hosts can be connected to."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

import psutil

__all__ = ["Address", "addresses_here", "connection_errors", "listen_on"]

CONNECT_TIMEOUT_S = 3.0


class Address(NamedTuple):
    """An IPv4 address of a host."""

    interface: str
    address: str
    prefix: int
    """The number of bits of its network."""


def addresses_here() -> list[Address]:
    """The IPv4 addresses of this host, without those of loopback."""
    states = psutil.net_if_stats()
    found = []
    for interface, entries in psutil.net_if_addrs().items():
        if interface in states and not states[interface].isup:
            continue
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                mask = socket.inet_aton(entry.netmask or "255.255.255.255")
                prefix = bin(int.from_bytes(mask, "big")).count("1")
                found.append(Address(interface, entry.address, prefix))
    return found


def listen_on(addresses: Sequence[str]) -> list[socket.socket]:
    """A listening socket on a free port of each address of this host."""
    return [socket.create_server((address, 0)) for address in addresses]


def connection_errors(
    targets: Sequence[tuple[str, int]], timeout_s: float = CONNECT_TIMEOUT_S
) -> list[str]:
    """Try to connect to all targets at once.

    Args:
        targets: Addresses and ports.
        timeout_s: Seconds for all of them.

    Returns:
        For each target the error, "" if it accepts connections.
    """
    errors = ["no answer"] * len(targets)
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for index, target in enumerate(targets):
            end = socket.socket()
            end.setblocking(False)
            code = end.connect_ex(target)
            if code in (0, errno.EINPROGRESS):
                selector.register(end, selectors.EVENT_WRITE, index)
            else:
                errors[index] = os.strerror(code)
                end.close()
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                end = key.fileobj  # type: ignore[assignment]
                code = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                errors[key.data] = os.strerror(code) if code else ""
                selector.unregister(end)
                end.close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return errors
