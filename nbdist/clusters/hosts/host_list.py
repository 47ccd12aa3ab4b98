"""Lists of hosts and slots, as in `horovodrun -H`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.errors import UsageError
from nbdist.ipc.resources import is_this_host

__all__ = ["HostSlots", "parse_hosts", "slots_here"]

_ENTRY = re.compile(r"(?P<name>[\w.-]+|\[[\da-fA-F:]+\])(?::(?P<slots>\d+))?")


@dataclass(frozen=True)
class HostSlots:
    """One entry of a list of hosts."""

    name: str
    slots: int
    """The most ranks that run on the host."""


def parse_hosts(text: str) -> list[HostSlots]:
    """Parse hosts such as "server1:4,server2:4". A host without a number has one slot.

    Raises:
        UsageError: The text is malformed, or names a host twice.
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
    """The number of slots of this host, which must be the only host.

    Raises:
        UsageError: Another host is named. No launcher starts ranks there yet.
    """
    others = [host.name for host in hosts if not is_this_host(host.name)]
    if others:
        raise UsageError(
            f"-H {', '.join(others)}: nbdist cannot start ranks on other hosts yet: "
            f"use -H localhost:{hosts[0].slots}, or start a script on these hosts with "
            "mpiexec and nbdist.init()"
        )
    return sum(host.slots for host in hosts)
