"""Writes files so that a reader sees the old file or the new one.

Imports little of the standard library, because the parent of each rank needs it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

TYPE_CHECKING = False  # the parent of each rank does not import `typing`
if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["umask", "write_atomically"]


def write_atomically(
    path: str | os.PathLike[str],
    write: Callable[[BinaryIO], object],
    *,
    mode: int | None = None,
    durable: bool = True,
) -> None:
    """Replace a file. A reader sees the old file or the new one.

    The content is written to a second file in the same folder, which is then renamed.
    Several processes may do so at once. The last rename counts.

    Args:
        path: The file, in a folder that exists.
        write: Writes the content to the open file. If it raises, the old file stays.
        mode: Permissions of the file; None for 0o666 without the umask's bits. Before
            the rename, only this user can read the file.
        durable: Flush the content to the disk before the rename, so that a crash of the
            machine leaves the old file or the new one. This takes milliseconds.

    Raises:
        OSError: The file could not be written. The old file stays.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.urandom(8).hex()}.part")
    # A random name with O_EXCL and O_NOFOLLOW. In a folder to which other users can
    # write, they cannot put a file or a link in its place.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(beside, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fchmod(descriptor, 0o666 & ~umask() if mode is None else mode)
            if durable:
                os.fsync(descriptor)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(target.parent)


def umask() -> int:
    """This process's umask. A query with `os.umask` would change it for a moment."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, if its file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
