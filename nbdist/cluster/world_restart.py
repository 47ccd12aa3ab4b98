"""What is saved of a world that cannot go on, for the one that is started in its place.

The last commit of an elastic run lies in files of the cluster's, which rank 0 writes
(`nbdist.training.elastic.commit_files`). They are there however the ranks have ended.
Where survivors could not meet anew, their agents, which answer even while the main
thread is stuck in MPI, write the variables.

A commit and a shipment hold pickles, so they lie in the cluster's private folders only
(`nbdist.ipc.private_files`), and are read only if nobody else can have written them.
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
from typing import BinaryIO, NamedTuple

from nbdist.cluster.rank_registry import Roster
from nbdist.errors import CheckpointError
from nbdist.ipc import endpoints
from nbdist.ipc.private_files import (
    check_file,
    commit_folders,
    memory_folder,
    open_file,
    read_file,
)
from nbdist.ipc.shm_payload import Shipment
from nbdist.training.elastic import checkpoint
from nbdist.training.elastic.commit_files import (
    RECORD,
    Record,
    read_record,
    write_record,
)
from nbdist.wire import ElasticCall, Notice, Resume

__all__ = ["LastCommit", "Rescue", "last_commit"]

SAVE_TIMEOUT_S = 30.0
RESUME = "resume"
"""The folder of a commit that a cluster's ranks begin from."""


class LastCommit:
    """A commit whose files are open: they stay although the cluster's folder goes."""

    def __init__(self, record: Record, data: int) -> None:
        """Take a record, and the descriptor of its data file."""
        self._record = record
        self._data = data
        weakref.finalize(self, os.close, data)

    @classmethod
    def open(cls, folder: Path) -> LastCommit | None:
        """The commit in a folder that no rank writes to; None where there is none."""
        path = folder / RECORD
        try:
            check_file(path)
            record = read_record(checkpoint.check(path))
            return cls(record, open_file(folder / record.data))
        except (OSError, CheckpointError):
            return None

    @property
    def number(self) -> int:
        """Counts a run's commits from 1."""
        return self._record.commit

    def give(self, run_dir: Path) -> Resume:
        """Copy it to a new cluster's folder, for its ranks to begin from.

        Raises:
            OSError: No folder has room.
        """
        problem = OSError(errno.ENOSPC, "no folder to write to")
        for parent in dict.fromkeys((memory_folder(run_dir), run_dir)):
            folder = parent / RESUME
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                _copy(self._data, folder / self._record.data)
                write_record(folder, self._record)
            except OSError as error:
                problem = error
                shutil.rmtree(folder, ignore_errors=True)
            else:
                return Resume(str(folder / RECORD), trusted=True)
        raise problem

    def write_state(self, file: BinaryIO) -> None:
        """Write it to a file as `state.save` does."""
        self._record.write_state(file, self._data)


def _copy(source: int, path: Path) -> None:
    """Copy a whole file to a new one of this user's; the kernel does it."""
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


def last_commit(run_dir: Path) -> LastCommit | None:
    """The last commit of a cluster that is to end; None where there is none.

    The first call takes the files away from ranks that may still write.
    """
    resumed = [folder.with_name(RESUME) for folder in commit_folders(run_dir)]
    for folder in [*map(_taken, commit_folders(run_dir)), *resumed]:
        if (commit := LastCommit.open(folder)) is not None:
            return commit
    return None


def _taken(folder: Path) -> Path:
    """The folder under a name that no rank knows.

    A rank that commits now finds no folder for its record, and does not touch what the
    last record names.
    """
    taken = folder.with_name(f"{folder.name}-taken")
    with contextlib.suppress(OSError):  # there is none, or it was taken before
        folder.rename(taken)
    return taken


class Kept(NamedTuple):
    """A rank's variables."""

    shipment: Shipment
    contents: bytes | None
    """Of the shipment's file, if it has one."""

    def shipped(self, run_dir: Path) -> Shipment:
        """The variables as a shipment of a new cluster's."""
        if self.contents is None:
            return self.shipment
        contents, folders = self.contents, (memory_folder(run_dir), run_dir)
        path = _write(lambda file: file.write(contents), *folders)
        return Shipment(path=str(path), sizes=self.shipment.sizes)


@dataclass(frozen=True)
class Rescue:
    """The variables of each rank that lives, and the last commit of an elastic run."""

    call: ElasticCall | None = None
    """The elastic run; None where there is none."""
    commit: LastCommit | None = None
    """None where there was no commit."""
    variables: Mapping[int, Kept] = field(default_factory=dict)
    """By rank."""

    @classmethod
    def from_survivors(cls, roster: Roster, notices: Mapping[int, Notice]) -> Rescue:
        """Of ranks whose agents answer, whatever their main threads are stuck in.

        Args:
            notices: What the ranks that are paused in an elastic run have said.
        """
        living = [info.rank for info in roster.living]
        paused = [rank for rank in living if rank in notices]
        call = notices[paused[0]].call if paused else None
        target = endpoints.ELASTIC_VARIABLES
        answers = roster.ask(target, ranks=living, timeout_s=SAVE_TIMEOUT_S)
        variables = {
            rank: Kept(shipment, _contents(shipment))
            for rank, shipment in answers.items()
            if shipment is not None
        }
        return cls(call, last_commit(roster.run_dir) if paused else None, variables)

    def resume(self, run_dir: Path) -> Resume | None:
        """The commit as a file of a new cluster's."""
        return None if self.commit is None else self.commit.give(run_dir)

    def keep(self) -> str:
        """Write the commit where it outlives the cluster; the way back, in words."""
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
            return f"the last commit is lost, for it could not be written: {error}"
        number = self.commit.number
        return f"the last commit, number {number}, is kept: %dist_start --resume {path}"


def _contents(shipment: Shipment) -> bytes | None:
    return None if shipment.path is None else read_file(Path(shipment.path))


def _lasting() -> Iterator[Path]:
    """Folders whose files stay when the cluster ends."""
    with contextlib.suppress(FileNotFoundError):  # no temporary folder takes a file
        yield Path(tempfile.gettempdir())
    yield Path.cwd()


def _write(
    fill: Callable[[BinaryIO], object],
    *folders: Path,
    prefix: str = "",
    suffix: str = "",
) -> Path:
    """Write a new file of a random name, in the first of the folders that has room.

    Raises:
        OSError: None has.
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
