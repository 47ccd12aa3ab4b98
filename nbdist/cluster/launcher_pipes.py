"""Keeping Open MPI's daemon alive when a rank and its parent process end together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from nbdist.wire import RankInfo

__all__ = ["LauncherPipes"]

OUTPUTS = (1, 2)


class LauncherPipes:
    """Holds the pipes that connect the ranks' parent processes with the MPI launcher.

    Open MPI's daemon (PRRTE 3) forgets a process when it has ended and its output is
    closed. When the rank, or a child that it has forked, is still connected to the
    daemon at that moment, the daemon stops serving all ranks. It forgets nobody while
    somebody else holds the output open. It tells the other ranks of the end all the
    same.

    Only Linux lets a process open another one's pipes; elsewhere nothing is held.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[int]] = {}

    def hold(self, infos: Iterable[RankInfo]) -> None:
        """Hold the pipes of these ranks too; those that are held already stay."""
        for info in infos:
            if info.parent_pid not in self._held:
                self._held[info.parent_pid] = list(_opened(info.parent_pid))

    def close(self) -> None:
        """Let go of all pipes. A second close is harmless."""
        for descriptors in self._held.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self._held.clear()


def _opened(pid: int) -> Iterable[int]:
    for output in OUTPUTS:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            path = f"/proc/{pid}/fd/{output}"
            yield os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
