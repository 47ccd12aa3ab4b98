"""Copies the files of a folder to other hosts, before each cell what has changed.

The files are those that git would list: tracked ones, and untracked ones that it does
not ignore. Without git, hidden files and the usual folders of caches and environments
are left out. On a host, the copy is a folder of its own below the user's cache folder,
which lasts, so that the next start sends differences only. Files that a rank makes
there stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from nbdist.errors import UsageError
from nbdist.ipc.atomic_files import write_atomically
from nbdist.ipc.resources import host_name

__all__ = ["FolderCopy", "FolderSync", "Stamp", "difference"]

GIT_TIMEOUT_S = 10.0
MOST_FILE_BYTES = 50_000_000
"""Larger files are data, which has other ways to a host."""
MOST_FILES = 20_000
LEFT_OUT = {"__pycache__", "node_modules", "venv", "site-packages"}
"""Folders that are left out where git does not say what to leave out."""
LIST = ".nbdist-sync"
"""The file in a copy that lists what was copied, so that no other file is removed."""

Stamp = tuple[int, int]
"""The size of a file, and when it was changed, in nanoseconds."""


class FolderSync:
    """A folder of this host, of which hosts have copies.

    Args:
        folder: The folder.

    Raises:
        UsageError: It does not exist, or has too many files.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser().resolve()
        if not self.folder.is_dir():
            raise UsageError(f"--sync {folder}: {self.folder} is not a folder")
        identity = f"{host_name()}:{self.folder}".encode()
        digest = hashlib.sha256(identity).hexdigest()[:12]
        self.name = f"{self.folder.name or 'root'}-{digest}"
        """The name of a copy."""
        self.left_out: list[str] = []
        """Files that are too large."""
        self.stamps()

    def stamps(self) -> dict[str, Stamp]:
        """The files, by their path in the folder.

        Raises:
            UsageError: There are too many.
        """
        found: dict[str, Stamp] = {}
        self.left_out = []
        for name in self._listed():
            try:
                state = (self.folder / name).stat()
            except OSError:  # it was removed, or is a broken link
                continue
            if state.st_size > MOST_FILE_BYTES:
                self.left_out.append(name)
            elif (self.folder / name).is_file():
                found[name] = state.st_size, state.st_mtime_ns
            if len(found) > MOST_FILES:
                raise UsageError(
                    f"--sync {self.folder} has more than {MOST_FILES:,} files: name a "
                    "smaller folder, or leave files out by a .gitignore"
                )
        return found

    def _listed(self) -> Iterable[str]:
        command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
        try:
            listed = subprocess.run(
                command,
                cwd=self.folder,
                capture_output=True,
                timeout=GIT_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):  # no git, or no repository
            return self._walked()
        return [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]

    def _walked(self) -> Iterator[str]:
        for folder, names, files in os.walk(self.folder):
            names[:] = [
                name
                for name in names
                if not name.startswith(".") and name not in LEFT_OUT
            ]
            for file in files:
                if not file.startswith("."):
                    yield os.path.relpath(os.path.join(folder, file), self.folder)

    def packed(self, names: Iterable[str]) -> bytes:
        """Some files for `FolderCopy.update`. Leaves out those removed meanwhile."""
        entries, contents = [], []
        for name in names:
            try:
                with (self.folder / name).open("rb") as file:
                    state = os.fstat(file.fileno())
                    content = file.read()
            except OSError:
                continue
            mode = stat.S_IMODE(state.st_mode)
            entries.append((name, mode, state.st_mtime_ns, len(content)))
            contents.append(content)
        return b"".join([json.dumps(entries).encode(), b"\n", *contents])

    def path_in_copy(self, path: str, copy: str) -> str | None:
        """The path of a file of the folder in a copy; None if it is elsewhere."""
        resolved = Path(path).resolve()
        if not resolved.is_relative_to(self.folder):
            return None
        return str(Path(copy) / resolved.relative_to(self.folder))


class FolderCopy:
    """The copy of a folder of another host, on this one.

    Args:
        name: The name of the copy.
    """

    def __init__(self, name: str) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self.folder = Path(cache).expanduser() / "nbdist" / "sync" / Path(name).name
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def stamps(self) -> dict[str, Stamp]:
        """The files that were copied and are unchanged, by their path."""
        found: dict[str, Stamp] = {}
        for name in self._copied():
            try:
                state = (self.folder / name).stat()
            except OSError:  # it was removed
                continue
            found[name] = state.st_size, state.st_mtime_ns
        return found

    def update(self, packed: bytes, removed: Iterable[str]) -> None:
        """Write and remove files. A reader sees the old file or the new one.

        Args:
            packed: The files, by `FolderSync.packed`.
            removed: Files that were copied and no longer exist.

        Raises:
            OSError: There is no room.
            ValueError: A path leaves the folder.
        """
        copied = set(self._copied())
        for name in set(removed) & copied:
            self._path(name).unlink(missing_ok=True)
        head, _, contents = packed.partition(b"\n")
        begin = 0
        for name, mode, changed_ns, size in json.loads(head):
            path = self._path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            content = contents[begin : begin + size]
            write_atomically(path, partial(_write, content), mode=mode, durable=False)
            os.utime(path, ns=(changed_ns, changed_ns))
            begin += size
            copied.add(name)
        kept = "\0".join(sorted(copied - set(removed)))
        listed = partial(_write, kept.encode("utf-8", "surrogateescape"))
        write_atomically(self.folder / LIST, listed, mode=0o600, durable=False)

    def _path(self, name: str) -> Path:
        path = Path(os.path.normpath(self.folder / name))
        if not path.is_relative_to(self.folder):
            raise ValueError(f"{name!r} is not in the folder")
        return path

    def _copied(self) -> list[str]:
        try:
            text = (self.folder / LIST).read_text("utf-8", "surrogateescape")
        except FileNotFoundError:
            return []
        return [name for name in text.split("\0") if name]


def _write(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def difference(
    here: Mapping[str, Stamp], there: Mapping[str, Stamp]
) -> tuple[list[str], list[str]]:
    """The files to send, and those to remove."""
    changed = [name for name, stamp in here.items() if there.get(name) != stamp]
    return changed, [name for name in there if name not in here]
