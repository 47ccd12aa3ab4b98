"""The interface of what starts the ranks of a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Launcher"]


class Launcher(ABC):
    """Makes the command line that starts n ranks.

    Adding a launcher needs nothing but the properties and methods of this class.
    """

    @property
    @abstractmethod
    def description(self) -> str:
        """The launcher and its version, as shown to the user."""

    @property
    @abstractmethod
    def is_fault_tolerant(self) -> bool:
        """Whether the other ranks survive the death of one."""

    @abstractmethod
    def argv(self, n: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` as `n` ranks."""

    @abstractmethod
    def environment(self, n: int, run_dir: Path) -> Mapping[str, str]:
        """Variables to add to the environment of that command line.

        Args:
            run_dir: The cluster's run folder, for files of the launcher.
        """
