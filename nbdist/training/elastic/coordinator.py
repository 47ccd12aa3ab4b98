"""Who decides what follows a failure: the notebook, where there is one.

`nbdist.elastic.run` knows only this protocol. The engine of a notebook's rank installs
a coordinator that asks the notebook; without one a failure ends the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from nbdist.wire import ElasticCall, Resume, Verdict

__all__ = ["Coordinator", "NoCoordinator", "coordinator", "install"]


class Coordinator(Protocol):
    """The link of an elastic run to whoever changes the membership."""

    @property
    def resize_wanted(self) -> bool:
        """Whether the next commit should end in a change of the world's size."""

    resume: Resume | None
    """The file that a new `State` begins from."""

    @property
    def commit_folders(self) -> Sequence[Path]:
        """Where the commits of rank 0 outlive all ranks, best first.

        None where nobody would read them. All are this user's alone. `commit_files`
        says what lies there.
        """

    def enter(self, call: ElasticCall) -> str:
        """A run begins: "begin" it, "join" the others in it, or "skip" what is over."""

    def leave(self) -> None:
        """The run has ended on this rank, well or not."""

    def pause(self, reason: str, commit: int, error: BaseException | None) -> Verdict:
        """This rank can do no more by itself; wait until it is known what follows.

        Args:
            reason: "failure", "resize", or "finished": released from the last meeting.
            commit: the number of this rank's last commit.
            error: what released it.
        """


class NoCoordinator:
    """Nobody can replace a rank: under a plain `mpiexec` or `torchrun`."""

    resize_wanted = False
    resume: Resume | None = None
    commit_folders: Sequence[Path] = ()

    def enter(self, call: ElasticCall) -> str:
        """Begin."""
        return "begin"

    def leave(self) -> None:
        """Nobody listens."""

    def pause(self, reason: str, commit: int, error: BaseException | None) -> Verdict:
        """Give up: what released this rank is raised again."""
        return Verdict("give up")


_installed: Coordinator = NoCoordinator()


def coordinator() -> Coordinator:
    """The one of this process."""
    return _installed


def install(one: Coordinator) -> None:
    """Let this one decide from now on."""
    global _installed
    _installed = one
