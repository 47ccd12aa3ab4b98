"""Files of /proc that are read again and again."""

from __future__ import annotations

import os

__all__ = ["ProcFile"]


class ProcFile:
    """A file of /proc, which is kept open.

    To find and open one takes about twenty times as long as to read it.

    Args:
        path: Its path, in which "self" is the process that makes this object.
        most_bytes: The most bytes that are read.
    """

    def __init__(self, path: str, most_bytes: int = 1024) -> None:
        self._most_bytes = most_bytes
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            self._descriptor = -1

    def read(self) -> bytes:
        """The content now; empty if this system has no such file, or refuses."""
        if self._descriptor < 0:
            return b""
        try:
            return os.pread(self._descriptor, self._most_bytes, 0)
        except OSError:
            return b""

    def close(self) -> None:
        """Close the file. It is empty from now on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
