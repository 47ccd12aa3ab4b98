"""The ranks, as Horovod counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import nbdist
from nbdist.collectives import default_group
from nbdist.errors import WrongProcess

from . import _process_sets
from ._process_sets import ProcessSet, add_process_set

__all__ = [
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]


def init(
    comm: Sequence[int] | Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Join the world: a notebook's cluster, or that of `mpiexec` or `torchrun`.

    Every rank must call. When called again, this does nothing, unless the ranks have
    changed.

    Args:
        comm: The ranks to use, or an mpi4py communicator over them; default all.
        process_sets: Sets to add at once, or "dynamic", which nothing depends on here.

    Raises:
        WrongProcess: Nothing has started this process as a rank.
    """
    nbdist.init()
    if _process_sets.is_begun():
        return
    _process_sets.end()
    ranks = comm if comm is None or isinstance(comm, Sequence) else _ranks_of(comm)
    _process_sets.begin(default_group(), ranks or None)
    if process_sets is not None and not isinstance(process_sets, str):
        for each in process_sets:
            add_process_set(each)


def _ranks_of(comm: Any) -> list[int]:
    members = comm.group
    own: list[int] = members.Translate_ranks(None, default_group().comm.group)
    return own


def shutdown() -> None:
    """Leave the world again. Calls under way end. Safe to call twice."""
    _process_sets.end()


def is_initialized() -> bool:
    """Whether `init` was called, and the ranks have not changed since."""
    try:
        default_group()
    except WrongProcess:
        return False
    return _process_sets.is_begun()


def rank() -> int:
    """This process's number, 0 to `size() - 1`.

    Raises:
        UsageError: Before `init`. So do all the functions here.
    """
    return _process_sets.members().rank


def size() -> int:
    """The number of ranks."""
    return _process_sets.members().size


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return _neighbours().index(rank())


def local_size() -> int:
    """The number of ranks on this host."""
    return len(_neighbours())


def cross_rank() -> int:
    """This host's number among those that have a rank of this local number."""
    return _peers().index(rank())


def cross_size() -> int:
    """The number of hosts that have a rank of this local number."""
    return len(_peers())


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    hosts = _hosts()
    return len({hosts.count(host) for host in hosts}) == 1


def _hosts() -> tuple[int, ...]:
    return _process_sets.members().hosts


def _neighbours() -> list[int]:
    hosts = _hosts()
    return [peer for peer, host in enumerate(hosts) if host == hosts[rank()]]


def _peers() -> list[int]:
    """The ranks of this local number, one of each host that has one."""
    hosts, local = _hosts(), local_rank()
    found = []
    for peer, host in enumerate(hosts):
        if hosts[:peer].count(host) == local:
            found.append(peer)
    return found
