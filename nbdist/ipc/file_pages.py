"""The pages of programs and libraries that a process has read."""

from __future__ import annotations

import ctypes
import mmap
import sys

__all__ = ["release_file_pages"]


def release_file_pages() -> None:
    """Unmap the pages of files that this process has read and not written.

    They no longer count as its memory. Linux maps a page again when the process reads
    it, mostly from memory. On other systems the function has no effect.

    Note:
        A second thread could write to such a page meanwhile, as the linker does, and
        the write would be lost. Call it in a process with one thread.
    """
    if sys.platform != "linux":
        return
    import psutil

    libc = ctypes.CDLL(None)
    for region in psutil.Process().memory_maps(grouped=False):
        # The linker has written to some regions that are read-only since.
        is_read_only = region.perms.endswith("p") and "w" not in region.perms
        if region.path.startswith("/") and is_read_only and not region.anonymous:
            begin, end = (int(address, 16) for address in region.addr.split("-"))
            size = ctypes.c_size_t(end - begin)
            libc.madvise(ctypes.c_void_p(begin), size, mmap.MADV_DONTNEED)
