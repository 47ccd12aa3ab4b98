"""The interface of launchers, which start the ranks of a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Launcher"]


class Launcher(ABC):
    """Makes the command line that starts n ranks.

    A new launcher implements only the properties and methods of this class.
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
        """The command line that runs `command` on `n` ranks."""

    @abstractmethod
    def environment(
        self, n: int, run_dir: Path, interface: str | None = None
    ) -> Mapping[str, str]:
        """The environment variables to add for the command line of `argv`.

        Args:
            n: The number of ranks on this host.
            run_dir: The cluster's run folder on this host, for files of the launcher.
            interface: This host's interface in the network of the ranks; None if all
                ranks are on this host.
        """
