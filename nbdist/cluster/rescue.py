"""What is saved of a world that cannot go on, for the one that is started in its place.

Where MPI has no fault tolerance (MPICH, Open MPI before 5), one dead rank ends all of
them: there rank 0 keeps each commit of an elastic run in a file in memory. And where
survivors could not meet anew, their agents, which answer even while the main thread is
stuck in MPI, write the last commit and the variables.

A commit and a shipment hold pickles, so they lie in the cluster's private folders only
(`nbdist.engine.private_files`), and are read only if nobody else can have written them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nbdist.cluster.roster import Roster
from nbdist.engine.private_files import memory_folder, read_file
from nbdist.engine.shipping import Shipment
from nbdist.wire import ElasticCall, Notice, Resume

__all__ = ["Rescue", "last_commit", "vault"]

SAVE_TIMEOUT_S = 30.0


def vault(run_dir: Path) -> Path:
    """Where a commit is written first; see `last_commit`."""
    return memory_folder(run_dir) / "commit"


def last_commit(run_dir: Path) -> bytes | None:
    """The commit that a rank has written: to memory, or without room to the run folder.

    None where there is none.
    """
    for path in (vault(run_dir), run_dir / "commit"):
        with contextlib.suppress(FileNotFoundError):
            return read_file(path)
    return None


class Kept(NamedTuple):
    """A rank's variables."""

    shipment: Shipment
    contents: bytes | None
    """Of the shipment's file, if it has one."""

    def shipped(self, run_dir: Path) -> Shipment:
        """The variables as a shipment of a new cluster's."""
        if self.contents is None:
            return self.shipment
        path = _write(self.contents, memory_folder(run_dir), run_dir)
        return Shipment(path=str(path), sizes=self.shipment.sizes)


@dataclass(frozen=True)
class Rescue:
    """The variables of each rank that lives, and the last commit of an elastic run."""

    call: ElasticCall | None = None
    """The elastic run; None where there is none."""
    commit: bytes | None = None
    """A file of saved state; None where there was no commit."""
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
        if paused:
            source = max(paused, key=lambda rank: (notices[rank].commit, -rank))
            path = str(vault(roster.run_dir))
            target = "nbdist.engine.elastic:preserve"
            roster.ask(target, path, ranks=[source], timeout_s=SAVE_TIMEOUT_S)
        target = "nbdist.engine.elastic:variables"
        answers = roster.ask(target, ranks=living, timeout_s=SAVE_TIMEOUT_S)
        variables = {
            rank: Kept(shipment, _contents(shipment))
            for rank, shipment in answers.items()
            if shipment is not None
        }
        return cls(call, last_commit(roster.run_dir) if paused else None, variables)

    def resume(self, run_dir: Path) -> Resume | None:
        """The commit as a file of a new cluster's."""
        if self.commit is None:
            return None
        path = _write(self.commit, memory_folder(run_dir), run_dir)
        return Resume(str(path), trusted=True)

    def keep(self) -> str:
        """Write the commit where it outlives the cluster; the way back, in words."""
        if self.commit is None:
            return "there was no commit yet"
        try:
            path = _write(
                self.commit, *_lasting(), prefix="nbdist-commit-", suffix=".state"
            )
        except OSError as error:
            return f"the last commit is lost, for it could not be written: {error}"
        return f"the last commit is kept: %dist_start --resume {path}"


def _contents(shipment: Shipment) -> bytes | None:
    return None if shipment.path is None else read_file(Path(shipment.path))


def _lasting() -> Iterator[Path]:
    """Folders whose files stay when the cluster ends."""
    with contextlib.suppress(FileNotFoundError):  # no temporary folder takes a file
        yield Path(tempfile.gettempdir())
    yield Path.cwd()


def _write(contents: bytes, *folders: Path, prefix: str = "", suffix: str = "") -> Path:
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
                file.write(contents)
        except OSError as error:
            os.unlink(path)
            problem = error
        else:
            return Path(path)
    raise problem
