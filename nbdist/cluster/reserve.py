"""Disk space that is kept for the processes that replace dead ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Reserve"]

RESERVE_BYTES = 4 << 20
"""A rank that joins writes about 0.1 MB to the run folder: what it is doing, where its
torch meets the others', and Open MPI's tables."""


class Reserve:
    """A file in the run folder that holds space, and gives it back while ranks join.

    So ranks can be replaced after the disk has become full. Where there is no room for
    the file either, there is no reserve.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "reserve"
        self._take()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Give the space back for the time of a `with`."""
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # no room, or the cluster is gone already
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            finally:
                os.close(descriptor)
