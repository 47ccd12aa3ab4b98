"""Folders and files that only this user's processes can read and write.

A cluster keeps its files in two folders of mode 0700: its run folder, and a folder in
shared memory. The symbolic link `memory` in the run folder names the second one. Both
have random names and are made with `mkdir`, which fails if the name exists. Other users
can see the names, but can neither read nor write files in the folders. The process that
removes the folders knows both names, and does not read the link.

A file is checked before it is read, because some files are unpickled. A cleaner of
temporary folders may have removed a folder, and another user may have taken its name.

Imports only the standard library, because the process supervisor uses it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "check_file",
    "check_folder",
    "commit_folders",
    "create_file",
    "make_commit_folders",
    "make_memory_folder",
    "make_rendezvous_folder",
    "make_run_folder",
    "memory_folder",
    "new_memory_folder",
    "open_file",
    "read_file",
    "remove_folders",
    "rendezvous_folder",
    "reopenable",
]

MEMORY_FOLDER = Path("/dev/shm")
LINK = "memory"
COMMITS = "commits"
RENDEZVOUS = "rendezvous"
SEGMENT_BYTES = 4 << 20
"""Memory that each rank shares with the others through Open MPI."""
RUN_FOLDER_BYTES = 32 << 20
"""Free space that a run folder needs: for the files of Open MPI's launcher and of each
rank, for a recovery, and for the first output."""
REMOVE_TIMEOUT_S = 5.0
REMOVE_POLL_S = 0.05


def make_run_folder() -> Path:
    """Make a run folder in the temporary folder, or in /dev/shm if that is full.

    Raises:
        OSError: Neither folder has enough room and a path without "$". The message has
            the free space of each.
    """
    refused = []
    for find in (tempfile.gettempdir, lambda: str(MEMORY_FOLDER)):
        try:
            parent = Path(find())
            free = shutil.disk_usage(parent).free
            if "$" in str(parent):
                # IPython replaces what looks like a variable in its folders' paths.
                refused.append(f'{parent} has "$" in its path')
            elif free >= RUN_FOLDER_BYTES:
                return Path(tempfile.mkdtemp(prefix="nbdist-", dir=parent))
            else:
                refused.append(f"{parent} has {free / 1e6:.1f} MB free")
        except OSError as error:
            refused.append(error.strerror or str(error))
    raise OSError(
        f"no room for the cluster's files: {', '.join(refused)}; a cluster needs "
        f"{RUN_FOLDER_BYTES / 1e6:.0f} MB. Free some, or set TMPDIR to another folder"
    )


def new_memory_folder() -> Path:
    """A new name for a cluster's folder in shared memory. The folder is not made."""
    return MEMORY_FOLDER / f"nbdist-{secrets.token_hex(16)}"


def make_memory_folder(run_dir: Path, folder: Path) -> None:
    """Make the cluster's folder in shared memory, if there is shared memory.

    Args:
        run_dir: The cluster's run folder, which gets the link.
        folder: A name from `new_memory_folder`. The process that removes the folder
            must know it.
    """
    link = run_dir / LINK
    with contextlib.suppress(OSError):  # a full disk: the run folder is used
        link.symlink_to(folder)
        try:
            folder.mkdir(mode=0o700)
        except OSError:
            link.unlink()


def memory_folder(run_dir: Path) -> Path:
    """The cluster's folder in shared memory; the run folder if there is none.

    Raises:
        PermissionError: The folder belongs to another user, or is open to others.
    """
    try:
        folder = Path(os.readlink(run_dir / LINK))
    except FileNotFoundError:
        folder = run_dir
    return check_folder(folder)


def make_rendezvous_folder(run_dir: Path, ranks: int) -> None:
    """Make the folder for the files of `rendezvous_folder` in memory, if there is room.

    Args:
        run_dir: The cluster's run folder.
        ranks: The number of ranks.
    """
    folder = memory_folder(run_dir)
    with contextlib.suppress(OSError):  # the run folder is used
        if shutil.disk_usage(folder).free >= 2 * ranks * SEGMENT_BYTES:
            (folder / RENDEZVOUS).mkdir(mode=0o700)


def rendezvous_folder(run_dir: Path) -> Path:
    """The folder of the files through which Open MPI and torch connect the ranks.

    These files are written and mapped while ranks join, and a full disk would end the
    ranks and mpiexec with SIGBUS. Therefore the folder is in shared memory, if there
    was room at the start. Otherwise it is the run folder.

    Raises:
        PermissionError: The folder belongs to another user, or is open to others.
    """
    folder = memory_folder(run_dir) / RENDEZVOUS
    return check_folder(folder) if folder.exists() else run_dir


def make_commit_folders(run_dir: Path) -> None:
    """Make the folders in which rank 0 keeps the commits of elastic runs.

    Without these folders, ranks keep no commits.
    """
    for folder in commit_folders(run_dir):
        with contextlib.suppress(OSError):  # no room in this one
            folder.mkdir(mode=0o700)


def commit_folders(run_dir: Path) -> list[Path]:
    """The folders in which rank 0 keeps commits, the one in memory first.

    Raises:
        PermissionError: The cluster's folder in memory belongs to another user, or is
            open to others.
    """
    parents = dict.fromkeys((memory_folder(run_dir), run_dir))
    return [parent / COMMITS for parent in parents]


def check_folder(folder: Path) -> Path:
    """Return the folder, if only this user can write to it.

    Raises:
        PermissionError: The folder belongs to another user, is open to other users, or
            is a symbolic link.
        OSError: The folder does not exist.
    """
    _check(os.lstat(folder), stat.S_ISDIR, folder)
    return folder


def check_file(path: Path) -> None:
    """Check that only this user can have written a file.

    Raises:
        PermissionError: Another user may have written the file.
        OSError: It cannot be opened.
    """
    os.close(open_file(path))


def open_file(path: Path) -> int:
    """Open a file for reading, if only this user can have written it.

    Returns:
        A descriptor.

    Raises:
        PermissionError: Another user may have written the file.
        OSError: It cannot be opened.
    """
    check_folder(path.parent)
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _check(os.fstat(descriptor), stat.S_ISREG, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def reopenable() -> Iterator[None]:
    """Within this block, this user can open each file again that a library creates.

    A cell may have set a umask by which only root can. It is the whole process's, so
    another thread's files are private meanwhile.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def create_file(path: Path) -> BinaryIO:
    """Create a file that only this user can read, and open it to write bytes.

    Raises:
        OSError: It exists, or cannot be created.
    """
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def read_file(path: Path) -> bytes:
    """The content of a file, if only this user can have written it.

    Raises:
        OSError: As for `open_file`.
    """
    with os.fdopen(open_file(path), "rb") as file:
        return file.read()


def remove_folders(*folders: Path) -> None:
    """Remove folders of a cluster. Folders that do not exist are skipped.

    A process that is ending may write to a folder while it is removed. The removal is
    therefore repeated for at most `REMOVE_TIMEOUT_S`.
    """
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    for folder in folders:
        with contextlib.suppress(OSError):  # it is gone, or another user's
            while check_folder(folder):
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists() or time.monotonic() > deadline:
                    break
                time.sleep(REMOVE_POLL_S)


def _check(found: os.stat_result, is_kind: Callable[[int], bool], path: Path) -> None:
    own = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
    if not own or not is_kind(found.st_mode):
        raise PermissionError(
            f"{path} has mode {stat.filemode(found.st_mode)} and belongs to user "
            f"{found.st_uid}, so another user may have written it: it was not used"
        )
