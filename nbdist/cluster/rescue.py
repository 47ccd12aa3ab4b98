"""What is saved of a world that cannot go on, for the one that is started in its place.

Where MPI has no fault tolerance (MPICH, Open MPI before 5), one dead rank ends all of
them: there rank 0 keeps each commit of an elastic run in a file in memory. And where
survivors could not meet anew, their agents, which answer even while the main thread is
stuck in MPI, write the last commit and the variables.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from nbdist.cluster.roster import Roster
from nbdist.engine.shipping import Shipment, memory_folder
from nbdist.wire import ElasticCall, Notice, Resume

__all__ = ["Rescue", "vault"]

SAVE_TIMEOUT_S = 30.0


def vault(run_dir: Path) -> Path:
    """Where rank 0 keeps each commit; removed with the cluster's other files."""
    return memory_folder(run_dir) / f"{run_dir.name}-commit"


@dataclass(frozen=True)
class Rescue:
    """The last commit of an elastic run, and the variables of a rank."""

    call: ElasticCall
    commit: bytes | None
    """A file of saved state; None where there was no commit."""
    variables: Shipment | None = None
    contents: bytes | None = None
    """Of the variables' file."""

    @classmethod
    def from_survivors(
        cls, roster: Roster, notices: dict[int, Notice]
    ) -> Rescue | None:
        """Of ranks that are paused in an elastic run; None where none is."""
        living = [info.rank for info in roster.living if info.rank in notices]
        if not living:
            return None
        source = max(living, key=lambda rank: (notices[rank].commit, -rank))
        path = vault(roster.run_dir)
        saved = roster.ask(
            "nbdist.engine.elastic:bequeath",
            str(path),
            ranks=[source],
            timeout_s=SAVE_TIMEOUT_S,
        )[source]
        call = notices[source].call
        commit = path.read_bytes() if path.exists() else None
        if saved is None:
            return cls(call, commit)
        contents = None if saved.path is None else Path(saved.path).read_bytes()
        return cls(call, commit, saved, contents)

    def resume(self, run_dir: Path) -> Resume | None:
        """The commit as a file of a new cluster's."""
        if self.commit is None:
            return None
        path = memory_folder(run_dir) / f"{run_dir.name}-resume"
        path.write_bytes(self.commit)
        return Resume(str(path), trusted=True)

    def shipment(self, run_dir: Path) -> Shipment | None:
        """The variables as a shipment of a new cluster's."""
        if self.variables is None or self.contents is None:
            return self.variables
        path = memory_folder(run_dir) / f"{run_dir.name}-variables"
        path.write_bytes(self.contents)
        return Shipment(path=str(path), sizes=self.variables.sizes)

    def keep(self) -> str:
        """Write the commit where it outlives the cluster; the way back, in words."""
        if self.commit is None:
            return "there was no commit yet"
        with tempfile.NamedTemporaryFile(
            prefix="nbdist-commit-", suffix=".state", delete=False
        ) as file:
            file.write(self.commit)
        return f"the last commit is kept: %dist_start --resume {file.name}"
