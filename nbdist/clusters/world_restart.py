"""Saves a world that cannot continue, for the world that replaces it.

The last commit of an elastic run is in files that rank 0 has written
(`nbdist.training.elastic.commit_files`). They remain however the ranks have ended. If
the survivors could not form a world again, their control threads write their
variables. A control thread answers even while the main thread is blocked in MPI.

A commit and a shipment have pickles. They are therefore only in the cluster's private
folders (`nbdist.ipc.private_files`), and are read only if no other user can have
written them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from nbdist.clusters.rank_registry import RankRegistry
from nbdist.errors import CheckpointError, TransferError
from nbdist.ipc import endpoints, folders
from nbdist.ipc.private_files import (
    check_file,
    commit_folders,
    create_file,
    memory_folder,
    open_file,
    read_file,
)
from nbdist.ipc.shm_payload import Shipment
from nbdist.training.elastic import checkpoint
from nbdist.training.elastic.commit_files import (
    RECORD,
    STATE,
    Record,
    read_record,
    write_record,
)
from nbdist.wire import ElasticCall, Resume

if TYPE_CHECKING:
    from nbdist.clusters.hosts.hosts import Hosts

__all__ = ["LastCommit", "SavedWorld", "commit_files", "last_commit"]

SAVE_TIMEOUT_S = 30.0
RESUME = "resume"
"""The folder of the commit that a cluster's ranks resume from."""


class LastCommit:
    """A commit whose files are open, so that they outlive the cluster's folder."""

    def __init__(self, record: Record, data: int) -> None:
        """Own a record and the descriptor of its data file. `close` closes it."""
        self._record = record
        self._data = data
        self._close = weakref.finalize(self, os.close, data)

    @classmethod
    def open(cls, folder: Path) -> LastCommit | None:
        """The commit in a folder; None if there is none. No rank may write to it."""
        path = folder / RECORD
        try:
            check_file(path)
            record = read_record(checkpoint.check(path))
            return cls(record, open_file(folder / record.data))
        except (OSError, CheckpointError):
            return None

    def close(self) -> None:
        """Close the files, which frees their memory. A second close does nothing."""
        self._close()

    @property
    def data(self) -> str:
        """The name of its data file."""
        return self._record.data

    @property
    def number(self) -> int:
        """Counts a run's commits from 1."""
        return self._record.commit

    def give(self, run_dir: Path, hosts: Hosts | None) -> Resume:
        """Copy the commit to a new cluster's folder, for its ranks to resume from.

        Args:
            run_dir: The new cluster's run folder.
            hosts: The hosts of its ranks; None if all are on this host.

        Raises:
            OSError: No folder has room.
        """
        problem = OSError(errno.ENOSPC, "no folder to write to")
        for parent in dict.fromkeys((memory_folder(run_dir), run_dir)):
            folder = parent / RESUME
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                _copy(self._data, folder / self._record.data)
                if hosts is not None:
                    with create_file(folder / STATE) as file:
                        self.write_state(file)
                write_record(folder, self._record)
            except OSError as error:
                problem = error
                shutil.rmtree(folder, ignore_errors=True)
            else:
                return Resume(str(folder / RECORD), trusted=True)
        raise problem

    def write_state(self, file: BinaryIO) -> None:
        """Write the commit to a file, as `State.save` does."""
        self._record.write_state(file, self._data)


def _copy(source: int, path: Path) -> None:
    """Copy a whole file to a new private file, without reading it here."""
    size, done = os.fstat(source).st_size, 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    target = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(target, 0, size)
        while done < size:
            copied = os.sendfile(target, source, done, size - done)
            if not copied:
                raise OSError(errno.EIO, "a commit's file is too short")
            done += copied
    finally:
        os.close(target)


def last_commit(run_dir: Path, hosts: Hosts | None = None) -> LastCommit | None:
    """The last commit of a cluster that is about to end; None if there is none.

    The first call moves the files, because ranks may still write to the folder.

    Args:
        run_dir: The cluster's run folder.
        hosts: The hosts of the ranks; None if all are on this host.
    """
    newest = _last_commit_here(run_dir)
    places = [] if hosts is None else hosts.take_commits(memory_folder(run_dir))
    for place in places:
        commit = LastCommit.open(place)
        if commit is not None and (newest is None or commit.number > newest.number):
            newest = commit
    return newest


def _last_commit_here(run_dir: Path) -> LastCommit | None:
    for folder in _places(run_dir):
        if (commit := LastCommit.open(folder)) is not None:
            return commit
    return None


def commit_files(run_dir: Path) -> list[Path]:
    """The files of the last commit on this host, after `last_commit`'s move.

    Returns:
        The record and its data; [] if there is no commit.
    """
    for folder in _places(run_dir):
        if (commit := LastCommit.open(folder)) is not None:
            commit.close()
            return [folder / RECORD, folder / commit.data]
    return []


def _places(run_dir: Path) -> list[Path]:
    """The folders in which the last commit may be, moved out of the ranks' reach."""
    folders = commit_folders(run_dir)
    resumed = [folder.with_name(RESUME) for folder in folders]
    return [*map(_taken, folders), *resumed]


def _taken(folder: Path) -> Path:
    """Rename a folder to a name that no rank knows. Returns the new path.

    A rank that commits later finds no folder for its record, so it does not change the
    files of the last record.
    """
    taken = folder.with_name(f"{folder.name}-taken")
    with contextlib.suppress(OSError):  # it does not exist, or was taken before
        folder.rename(taken)
    return taken


class SavedVariables(NamedTuple):
    """The variables of a rank."""

    shipment: Shipment
    contents: bytes | None
    """Contents of the shipment's file; None if it has none."""

    def shipped(self, run_dir: Path) -> Shipment:
        """The variables as a shipment for a new cluster."""
        if self.contents is None:
            return self.shipment
        contents, folders = self.contents, (memory_folder(run_dir), run_dir)
        path = _write(lambda file: file.write(contents), *folders)
        return Shipment(path=str(path), sizes=self.shipment.sizes)


@dataclass(frozen=True)
class SavedWorld:
    """The variables of each living rank, and the last commit of an elastic run."""

    call: ElasticCall | None = None
    """The elastic run that the ranks were in; None if they were in none."""
    commit: LastCommit | None = None
    """The last commit of the run; None if there was none."""
    variables: Mapping[int, SavedVariables] = field(default_factory=dict)
    """The variables, by rank."""

    @classmethod
    def from_survivors(
        cls, registry: RankRegistry, call: ElasticCall | None
    ) -> SavedWorld:
        """Save the variables of the ranks, also while their main threads are blocked.

        Args:
            registry: The ranks.
            call: The elastic run of the ranks; None outside an elastic run.
        """
        living = [info.rank for info in registry.living]
        target = endpoints.ELASTIC_VARIABLES
        answers = registry.ask(target, ranks=living, timeout_s=SAVE_TIMEOUT_S)
        variables = {}
        for rank, shipment in answers.items():
            if shipment is not None:
                with contextlib.suppress(TransferError):  # its host was lost
                    contents = _contents(registry.carrier.here(shipment))
                    variables[rank] = SavedVariables(shipment, contents)
        commit = None
        if call is not None:
            commit = last_commit(registry.run_dir, registry.hosts)
        return cls(call, commit, variables)

    def resume(self, run_dir: Path, hosts: Hosts | None) -> Resume | None:
        """The commit as a file of a new cluster; None if there is none."""
        return None if self.commit is None else self.commit.give(run_dir, hosts)

    def keep(self) -> str:
        """Write the commit to a file that outlives the cluster.

        Returns:
            A sentence that says how to resume from it.
        """
        if self.commit is None:
            return "there was no commit yet"
        try:
            path = _write(
                self.commit.write_state,
                *_lasting(),
                prefix="nbdist-commit-",
                suffix=".state",
            )
        except OSError as error:
            return f"the last commit is lost, because it could not be written: {error}"
        number = self.commit.number
        return f"the last commit, number {number}, is kept: %dist_start --resume {path}"


def _contents(shipment: Shipment) -> bytes | None:
    return None if shipment.path is None else read_file(Path(shipment.path))


def _lasting() -> Iterator[Path]:
    """The folders whose files outlive the cluster."""
    with contextlib.suppress(FileNotFoundError):  # no temporary folder is writable
        yield Path(tempfile.gettempdir())
    yield Path(folders.current())


def _write(
    fill: Callable[[BinaryIO], object],
    *folders: Path,
    prefix: str = "",
    suffix: str = "",
) -> Path:
    """Write a new file of a random name to the first folder that has room.

    Raises:
        OSError: No folder has room.
    """
    problem = OSError(errno.ENOSPC, "no folder to write to")
    for folder in folders:
        try:
            descriptor, path = tempfile.mkstemp(suffix, prefix, folder)
        except OSError as error:
            problem = error
            continue
        try:
            with os.fdopen(descriptor, "wb") as file:
                fill(file)
        except OSError as error:
            os.unlink(path)
            problem = error
        else:
            return Path(path)
    raise problem
