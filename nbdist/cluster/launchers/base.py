"""The seam between a cluster and whatever starts its ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Launcher"]


class Launcher(ABC):
    """Turns "run this command on n ranks" into one command of a launcher."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The launcher and its version, in words for a user."""

    @abstractmethod
    def argv(self, n: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` as `n` ranks."""

    @abstractmethod
    def environment(self, n: int, run_dir: Path) -> Mapping[str, str]:
        """What must be added to the environment of that command line."""
