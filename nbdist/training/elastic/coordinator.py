"""The coordinator decides what follows a failure in an elastic run.

`nbdist.elastic.run` uses only this protocol. On a notebook's rank, the engine installs
a coordinator that asks the notebook. Elsewhere a failure ends the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from nbdist.wire import ElasticCall, Resume, Verdict

__all__ = ["Coordinator", "NoCoordinator", "coordinator", "install"]


class Coordinator(Protocol):
    """The connection of an elastic run to the process that changes the world."""

    @property
    def resize_wanted(self) -> bool:
        """Whether the world should change its size at the next commit."""

    save_wanted: bool
    """Whether the next commit should be written to the state's file, also if it is not
    due. The commit that is written sets it to False."""

    resume: Resume | None
    """The file from which a new `State` loads its values; None for no file."""

    @property
    def commit_folders(self) -> Sequence[Path]:
        """The folders in which rank 0's commits survive all ranks, best first.

        The list is empty if no notebook would read the commits. Only this user can
        write to the folders. `commit_files` describes the files.
        """

    def enter(self, call: ElasticCall) -> str:
        """Report that a run begins on this rank.

        Returns:
            "begin" to begin the run; "join" on a rank that joins this run of the other
            ranks; "skip" on a rank that joins a later run of the same cell.
        """

    def leave(self) -> None:
        """Report that the run has ended on this rank, with or without an error."""

    def end_rank(self, reason: str) -> None:
        """End this process if it can be replaced; else return.

        Args:
            reason: the error of this process's CUDA context.
        """

    def pause(self, reason: str, commit: int, error: BaseException | None) -> Verdict:
        """Report that this rank cannot continue alone, and wait for the verdict.

        Args:
            reason: "failure", "resize", or "finished" if this rank has returned from
                the function and was released from the last barrier.
            commit: the number of this rank's last commit.
            error: the error that released this rank from a collective; None if there
                was none.
        """


class NoCoordinator:
    """The coordinator under a plain `mpiexec` or `torchrun`: no rank is replaced."""

    resize_wanted = False
    save_wanted = False
    resume: Resume | None = None
    commit_folders: Sequence[Path] = ()

    def enter(self, call: ElasticCall) -> str:
        """Begin the run."""
        return "begin"

    def leave(self) -> None:
        """Do nothing."""

    def end_rank(self, reason: str) -> None:
        """Return, because no other process can take this rank's place."""

    def pause(self, reason: str, commit: int, error: BaseException | None) -> Verdict:
        """Give up, so that the error is raised."""
        return Verdict("give up")


_installed: Coordinator = NoCoordinator()


def coordinator() -> Coordinator:
    """The coordinator of this process."""
    return _installed


def install(one: Coordinator) -> None:
    """Install a coordinator in this process."""
    global _installed
    _installed = one
