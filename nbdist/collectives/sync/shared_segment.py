"""Memory that the ranks of one host share, without a name that could outlive them."""

from __future__ import annotations

import mmap
import os

__all__ = ["Segment"]

_DIRECTORY = "/dev/shm"


class Segment:
    """A zeroed, nameless piece of shared memory.

    The creator makes a file without a directory entry, and the others open it through
    /proc while the creator holds it open. When the last process ends, in whatever way,
    the kernel takes it back.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor: int | None = descriptor
        self.memory = mmap.mmap(descriptor, size)
        """Mapped as long as anything refers to it."""

    @classmethod
    def create(cls, size: int) -> Segment:
        """Make one of `size` bytes.

        Raises:
            OSError: there is not that much memory to share.
        """
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("nbdist")
            os.ftruncate(descriptor, size)
        else:
            descriptor = os.open(_DIRECTORY, os.O_TMPFILE | os.O_RDWR, 0o600)
            # /dev/shm is often small; a page that is missing later kills the process.
            os.posix_fallocate(descriptor, 0, size)
        return cls(descriptor, size)

    @property
    def descriptor(self) -> int:
        """The open file, until `close_file`."""
        assert self._descriptor is not None
        return self._descriptor

    @property
    def address(self) -> str:
        """Where other processes of this user and host find it, while `share`d."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @classmethod
    def open(cls, address: str, size: int) -> Segment:
        """Map one that another process made.

        Raises:
            OSError: it cannot be reached, as from another container.
        """
        descriptor = os.open(address, os.O_RDWR)
        try:
            found = os.fstat(descriptor)
            # The creator may have ended, and its process id be another user's now.
            if found.st_uid != os.geteuid() or found.st_size != size:
                raise PermissionError(f"{address} is not the memory that was shared")
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    def close_file(self) -> None:
        """Nobody else can open it from now on; the mappings stay. Safe twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
