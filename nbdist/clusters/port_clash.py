"""Finds ranks that have each started a world of their own on the same port."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import psutil

from nbdist.wire import RankInfo, format_ranks

if TYPE_CHECKING:
    from nbdist.clusters.call import Call
    from nbdist.clusters.rank_registry import RankRegistry

__all__ = ["PortClash", "advice", "port_in_use"]

SURE_AFTER_S = 5.0
"""Seconds that a clash must last. A program that takes another port is not in one."""
LOOK_S = 1.0
IN_USE = re.compile("EADDRINUSE|[Aa]ddress already in use")
PORT = re.compile(r"(?:port: |\]:|\b(?:localhost|[\d.]{7,15}):)(\d{2,5})\b")


class _Found(NamedTuple):
    """A port that one rank's processes listen on, and others' processes need."""

    port: int
    holder: int
    others: frozenset[int]


class PortClash:
    """Watches a call whose program reports that a port is in use.

    A script that starts processes on a fixed port does so in each rank. The processes
    of one rank listen there. Those of the others cannot, or connect to the wrong ones
    and wait forever.
    """

    def __init__(self, registry: RankRegistry, call: Call) -> None:
        self._registry, self._call = registry, call
        self._found: _Found | None = None
        self._since = self._look_at = 0.0

    def look(self) -> str | None:
        """Check the ranks' processes, at most once a second. Call it repeatedly.

        Returns:
            The error, once a clash has lasted for `SURE_AFTER_S`; else None.
        """
        now = time.monotonic()
        if not self._call.ports_in_use or now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        found = self._find()
        if found != self._found or found is None:
            self._found, self._since = found, now
            return None
        if now < self._since + SURE_AFTER_S:
            return None
        return _describe(found)

    def _find(self) -> _Found | None:
        ports = self._call.ports_in_use
        infos = {info.rank: info for info in self._registry.living}
        waiting = {info.rank for info in self._call.unfinished}
        for port in sorted(set(ports.values())):
            holders = [rank for rank in infos if _listens(infos[rank], port)]
            if len(holders) != 1:
                continue
            others = {
                rank
                for rank in ports.keys() & infos.keys()
                if ports[rank] == port
                and rank != holders[0]
                and (rank not in waiting or _connects(infos[rank], port))
            }
            if others:
                return _Found(port, holders[0], frozenset(others))
        return None


def port_in_use(text: str) -> int | None:
    """The port that a text says is in use; None if it does not say so."""
    match = IN_USE.search(text)
    if match is None:
        return None
    # torch names the port before, and a server may name it after.
    around = text[max(0, match.start() - 300) : match.end() + 100]
    ports = PORT.findall(around)
    return int(ports[0]) if ports else None


def advice(ports: Mapping[int, int]) -> str:
    """What to do about ports that programs of the ranks could not use.

    Args:
        ports: The port that was in use, by rank.
    """
    ranks = ", ".join(
        f"port {port} was in use on rank "
        + format_ranks(rank for rank in ports if ports[rank] == port)
        for port in sorted(set(ports.values()))
    )
    return f"{ranks}. {_next_step(min(ports.values()))}"


def _next_step(port: int) -> str:
    return (
        "Each rank runs the same code, and the ranks are one world already: "
        "dist.init_process_group() joins it, without processes of its own. Where each "
        "rank is to start a world, give each a port: "
        f"MASTER_PORT = {port} + int(os.environ['RANK'])"
    )


def _describe(found: _Found) -> str:
    ranks = format_ranks(found.others)
    return (
        f"rank {ranks} cannot listen on port {found.port}, because rank "
        f"{found.holder}, or a process that it has started, listens there: each rank "
        "has started a world of its own on this port. All ranks were interrupted. "
        + _next_step(found.port)
    )


def _processes(info: RankInfo) -> Iterator[psutil.Process]:
    """A rank's process, and the processes that it has started."""
    try:
        rank = psutil.Process(info.pid)
        yield rank
        yield from rank.children(recursive=True)
    except psutil.Error:  # it has ended
        return


def _sockets(info: RankInfo) -> Iterator[tuple[bool, int]]:
    """(whether it listens, port) of each TCP socket of a rank's processes."""
    for process in _processes(info):
        try:
            sockets = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        for socket in sockets:
            if socket.status == psutil.CONN_LISTEN:
                yield True, socket.laddr.port
            elif socket.raddr:
                yield False, socket.raddr.port


def _listens(info: RankInfo, port: int) -> bool:
    return (True, port) in _sockets(info)


def _connects(info: RankInfo, port: int) -> bool:
    return (False, port) in _sockets(info)
