"""The working folder of a process, which somebody may remove or rename.

Imports only the standard library, because each kind of process uses it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["current", "enter", "is_gone", "name", "read", "restored", "write"]

FILE = "folder"
"""The name of the file in the run folder with the notebook's working folder."""
DELETED = " (deleted)"
"""What Linux adds to the path of a folder that was removed."""


def is_gone() -> bool:
    """Whether the working folder was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def name() -> str:
    """The path of the working folder, or the one that it had when it was removed."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    try:
        return os.readlink("/proc/self/cwd").removesuffix(DELETED)
    except OSError:
        return os.environ.get("PWD", "/")


def current() -> str:
    """The working folder. If it was removed, the nearest folder above that exists."""
    return _nearest(name())


def enter(*wanted: str) -> str:
    """Make the first of some folders that exists the working folder.

    If there is none, it is the nearest folder that exists above the first one.

    Returns:
        "" or a sentence, if it is not the first one.
    """
    for folder in (*wanted, _nearest(wanted[0])):
        try:
            os.chdir(folder)
        except OSError as error:
            reason = error.strerror
        else:
            break
    if folder == wanted[0]:
        return ""
    return f"works in {folder}, because {wanted[0]} cannot be entered: {reason}"


def _nearest(path: str) -> str:
    chosen = (each for each in (path, *map(str, Path(path).parents)) if _is_open(each))
    return next(chosen, "/")


def _is_open(folder: str) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.X_OK)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Return to the working folder after a `with` block, whatever its path is then."""
    here = os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC)
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def write(run_dir: Path) -> None:
    """Tell processes that start later where the notebook works now."""
    with contextlib.suppress(OSError):  # no room: they look for the folder of the start
        (run_dir / FILE).write_text(current(), "utf-8", "surrogateescape")


def read(run_dir: Path) -> list[str]:
    """What `write` has told last; empty before."""
    try:
        return [(run_dir / FILE).read_text("utf-8", "surrogateescape")]
    except OSError:
        return []
