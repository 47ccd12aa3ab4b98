"""Hosts and how many ranks each takes, as `horovodrun -H` writes them."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.errors import UsageError

__all__ = ["HostSlots", "parse_hosts", "slots_here"]

_ENTRY = re.compile(r"(?P<name>[\w.-]+|\[[\da-fA-F:]+\])(?::(?P<slots>\d+))?")
_HERE = {"localhost", "127.0.0.1", "[::1]"}


@dataclass(frozen=True)
class HostSlots:
    """One entry of a list of hosts."""

    name: str
    slots: int
    """Ranks that it takes."""


def parse_hosts(text: str) -> list[HostSlots]:
    """Hosts written as "server1:4,server2:4"; without a number, one slot.

    Raises:
        UsageError: It is written otherwise, or names a host twice.
    """
    hosts = []
    for part in text.split(","):
        found = _ENTRY.fullmatch(part.strip())
        slots = int(found["slots"] or 1) if found else 0
        if found is None or slots < 1:
            raise UsageError(
                f"-H {text!r}: {part.strip()!r} is not a host and its slots: expected "
                "such as localhost:4, or server1:4,server2:4"
            )
        hosts.append(HostSlots(found["name"], slots))
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"-H {text!r} names {', '.join(twice)} more than once")
    return hosts


def slots_here(hosts: Sequence[HostSlots]) -> int:
    """How many ranks are to run on this host, which must be the only one.

    Raises:
        UsageError: Another host is named: no launcher here reaches it yet.
    """
    others = [host.name for host in hosts if not _is_here(host.name)]
    if others:
        raise UsageError(
            f"-H {', '.join(others)}: ranks on other hosts are not possible yet, for "
            f"nothing here starts them over ssh; use -H localhost:{hosts[0].slots}, or "
            "start a script there with mpiexec and nbdist.init()"
        )
    return sum(host.slots for host in hosts)


def _is_here(name: str) -> bool:
    own = socket.gethostname()
    return name in _HERE or name.split(".")[0].lower() == own.split(".")[0].lower()
