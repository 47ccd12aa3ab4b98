"""The kept clusters of this user: list them, attach to one, and stop one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nbdist.clusters.kept import directory
from nbdist.clusters.kept.kept_cluster import KeptCluster, end_server
from nbdist.clusters.kept.link import ask
from nbdist.clusters.kept.messages import Description, Hello
from nbdist.clusters.kept.visitor import Visitor
from nbdist.errors import ClusterError, NotRunning, UsageError

__all__ = ["attach", "kept_clusters", "stop_cluster", "visit"]

DESCRIBE_TIMEOUT_S = 3.0
STOP_TIMEOUT_S = 30.0
AT_ONCE = 8


def attach(name: str | None = None, *, force: bool = False) -> KeptCluster:
    """Attach to a kept cluster of this user on this host.

    Args:
        name: The cluster's name; None if there is only one.
        force: Detach another process that is attached.

    Returns:
        The cluster. Its `unseen_cells` are the cells whose end nobody has seen.

    Raises:
        NotRunning: There is no such cluster.
        UsageError: There are several, or it runs on another host.
        AlreadyRunning: Another process is attached.
        ClusterError: The cluster does not answer.
    """
    entry = _entry(name)
    try:
        return KeptCluster.attached(entry, by_force=force)
    except OSError as error:
        raise NotRunning(f"{entry.name} has ended: {error.strerror or error}") from None


@contextlib.contextmanager
def visit(name: str | None = None) -> Iterator[Visitor]:
    """Look at a kept cluster beside the notebook that is attached, in a `with` block.

    Args:
        name: As for `attach`.

    Raises:
        NotRunning, UsageError, ClusterError: As for `attach`.
    """
    entry = _entry(name)
    try:
        visitor = Visitor.attached(entry)
    except OSError as error:
        raise NotRunning(f"{entry.name} has ended: {error.strerror or error}") from None
    with visitor:
        yield visitor


def kept_clusters() -> list[Description]:
    """The kept clusters of this user, in the order of their names."""
    entries = directory.entries()
    if not entries:
        return []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [each for each in pool.map(_described, entries) if each is not None]


def stop_cluster(name: str) -> None:
    """Stop a kept cluster, also one to which another process is attached.

    When this returns, all of its processes have ended.

    Raises:
        NotRunning: There is no such cluster.
        UsageError: It runs on another host.
    """
    entry = _entry(name)
    with contextlib.suppress(ClusterError, OSError):  # it is killed below
        ask(Path(entry.folder), Hello("stop"), name, STOP_TIMEOUT_S)
        end_server(entry.pid)
        return
    if directory.find(name) == entry:  # it does not answer
        end_server(entry.pid, timeout_s=0.0)
        directory.release(entry)


def _entry(name: str | None) -> directory.Entry:
    if name is not None:
        entry = directory.find(name)
        if entry is None:
            names = ", ".join(each.name for each in directory.entries()) or "none"
            raise NotRunning(f"no kept cluster is named {name}; running: {names}")
        if not entry.is_here:
            raise UsageError(f"{name} runs on {entry.host}: attach to it there")
        return entry
    running = [each.name for each in kept_clusters()]
    if not running:
        raise NotRunning(
            "no kept cluster is running: %dist_start --keep starts one that outlives "
            "its notebook"
        )
    if len(running) > 1:
        raise UsageError(f"several clusters are kept: name one of {', '.join(running)}")
    return _entry(running[0])


def _described(entry: directory.Entry) -> Description | None:
    """The state of a cluster; None if it has ended."""
    unknown = Description(
        entry.name, entry.host, entry.pid, "", 0.0, 0.0, doing="does not answer"
    )
    if not entry.is_here:
        return unknown
    try:
        hello = Hello("describe")
        return ask(
            Path(entry.folder), hello, entry.name, DESCRIBE_TIMEOUT_S
        ).description
    except ClusterError:
        return unknown
    except OSError:
        return None
