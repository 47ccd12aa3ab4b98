"""Memory that the ranks of one host share. It has no name and ends with its ranks."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from mpi4py import MPI

from nbdist.collectives.sync import semaphore
from nbdist.collectives.sync.wait import Swap

__all__ = ["Segment", "host_identity", "share"]

_DIRECTORY = "/dev/shm"


class Segment:
    """Zeroed shared memory without a name.

    The creator makes a file without a directory entry. The other ranks open it through
    /proc while the creator has it open. The kernel frees the memory when the last
    process that maps it ends.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor: int | None = descriptor
        self.memory = mmap.mmap(descriptor, size)
        """The mapping. It is unmapped with the last reference to it."""

    @classmethod
    def create(cls, size: int) -> Segment:
        """Make a segment of `size` bytes.

        Raises:
            OSError: There is not enough shared memory.
        """
        has_memfd = hasattr(os, "memfd_create")
        if has_memfd:
            descriptor = os.memfd_create("nbdist")
        else:
            descriptor = os.open(_DIRECTORY, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            if has_memfd:
                os.ftruncate(descriptor, size)
            else:
                # /dev/shm is often small. A write to a page without room is a SIGBUS.
                os.posix_fallocate(descriptor, 0, size)
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def descriptor(self) -> int:
        """The open file, until `close_file`."""
        assert self._descriptor is not None
        return self._descriptor

    @property
    def address(self) -> str:
        """The path at which this user's processes can open it, until `close_file`."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @classmethod
    def open(cls, address: str, size: int) -> Segment:
        """Map a segment that another process made.

        Raises:
            OSError: It cannot be opened, for instance from another container.
        """
        descriptor = os.open(address, os.O_RDWR)
        try:
            found = os.fstat(descriptor)
            # The creator may have ended, and another user's process may have its id.
            if found.st_uid != os.geteuid() or found.st_size != size:
                raise PermissionError(f"{address} is not shared memory of this user")
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    def close_file(self) -> None:
        """Close the file, so that no process can open it.

        Mappings stay. Safe to call twice.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def host_identity() -> str:
    """This process's host and PID namespace. Processes can share a segment if equal.

    All that compares the hosts of ranks compares these. A host's name may be that of
    other hosts too.
    """
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # no Linux
        return MPI.Get_processor_name()
    return f"{started}/{processes}"


def share(size: int, rank: int, hosts: Iterable[object], swap: Swap) -> Segment | None:
    """Map a segment of `size` bytes on all ranks. Every rank must call.

    The caller must call `close_file` on the segment.

    Args:
        size: Bytes of the segment.
        rank: This process's rank.
        hosts: For each rank, its `host_identity` or the number of its host.
        swap: Returns every rank's item.

    Returns:
        The segment; None, on all ranks, if one of them cannot map it.
    """
    if len(set(hosts)) > 1 or not semaphore.AVAILABLE:
        return None
    segment = None
    if rank == 0:
        with contextlib.suppress(OSError):  # there is not enough memory
            segment = Segment.create(size)
    address = swap(None if segment is None else segment.address)[0]
    if segment is None and address is not None:
        with contextlib.suppress(OSError):  # another container's, or another user's
            segment = Segment.open(address, size)
    if all(swap(segment is not None)):
        return segment
    if segment is not None:
        segment.close_file()
    return None
