"""Carries the files of large values between the hosts of a cluster.

A value travels once to each host, whose ranks then map one file, as the ranks of the
notebook's host do (`ipc.shm_payload`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.errors import ClusterError, TransferError
from nbdist.ipc import private_files, shm_payload
from nbdist.ipc.shm_payload import Shipment
from nbdist.training.elastic.commit_files import STATE
from nbdist.wire import Resume

if TYPE_CHECKING:
    from nbdist.clusters.hosts.hosts import Hosts
    from nbdist.clusters.hosts.remote_host import RemoteHost

__all__ = ["Carrier", "ScriptPath"]


class ScriptPath(str):
    """The path of a script on the notebook's host, as an argument for ranks."""

    __slots__ = ()


class Carrier:
    """Brings shipments to the host where they are needed.

    Args:
        hosts: The hosts; None if there is one.
        run_dir: The cluster's run folder on the notebook's host.
    """

    def __init__(self, hosts: Hosts | None, run_dir: Path) -> None:
        self._hosts, self._run_dir = hosts, run_dir
        self._copies: dict[str, dict[str, Any]] = {}
        """The copies of a file of this host on others, by its path and host."""

    def here(self, value: Any) -> Any:
        """A value of a rank's answer, with its file on this host.

        Raises:
            TransferError: The value's host does not send it.
        """
        host = self._elsewhere(value)
        if host is None:
            return value
        try:
            size = value.file_bytes
            with shm_payload.new_file(size, self._run_dir) as (path, file):
                self._of(host).ask("fetch", into=file, path=value.path)
        except (ClusterError, OSError) as error:
            raise TransferError(f"a value could not be copied: {error}") from error
        finally:
            self.discard(value)
        return replace(value, path=path, host="")

    def copied(self, host: str, path: str) -> str | None:
        """A copy here of a file that a rank of another host has in its run folder.

        It has the same name, and is removed with the run folder.

        Returns:
            Its path; None if the rank is on this host.

        Raises:
            ClusterError: The host does not send it.
            OSError: It cannot be written here.
        """
        if self._hosts is None or host not in self._hosts.others:
            return None
        copy = self._run_dir / Path(path).name
        copy.unlink(missing_ok=True)
        with private_files.create_file(copy) as file:
            self._of(host).ask("fetch", into=file, path=path)
        return str(copy)

    def to(self, host: str, value: Any) -> Any:
        """An argument for a rank, with its file on the rank's host.

        Raises:
            TransferError: The host does not take it.
            UsageError: The host does not have a script.
        """
        if isinstance(value, ScriptPath) and self._hosts is not None:
            return self._hosts.script_on(host, str(value))
        if not _has_file(value) or self._hosts is None:
            return value
        if host not in self._hosts.others:  # the notebook's
            return value
        copies = self._copies.setdefault(value.path, {})
        if host not in copies:
            path = Path(value.path)
            if isinstance(value, Resume):
                path = path.with_name(STATE)
            try:
                size = path.stat().st_size
                there = self._of(host).ask("put", body=path, size=size)
            except (ClusterError, OSError) as error:
                raise TransferError(f"a value could not be copied: {error}") from error
            copies[host] = replace(value, path=there)
        return copies[host]

    def discard(self, value: Any) -> None:
        """Remove the files of a shipment on all hosts; ignores other values.

        A commit stays on this host.
        """
        if not _has_file(value):
            return
        host = self._elsewhere(value)
        if host is not None:
            self._remove(host, value.path)
            return
        if isinstance(value, Shipment):
            shm_payload.discard(value)
        for name, copy in self._copies.pop(value.path, {}).items():
            self._remove(name, copy.path)

    def refuse(self, values: Iterable[Any]) -> None:
        """Discard those of the values that are shipments."""
        for value in values:
            self.discard(value)

    def _of(self, host: str) -> RemoteHost:
        assert self._hosts is not None
        return self._hosts.others[host]

    def _elsewhere(self, value: Any) -> str | None:
        """The host that has the file of a shipment; None if it is this host."""
        if not isinstance(value, Shipment) or value.path is None or self._hosts is None:
            return None
        return value.host if value.host in self._hosts.others else None

    def _remove(self, host: str, path: str) -> None:
        with contextlib.suppress(ClusterError):  # its files are removed with it
            self._of(host).ask("remove", path=path)


def _has_file(value: Any) -> bool:
    """Whether a value is a shipment with a file, or a commit of this cluster's."""
    if isinstance(value, Resume):
        return value.trusted
    return isinstance(value, Shipment) and value.path is not None
