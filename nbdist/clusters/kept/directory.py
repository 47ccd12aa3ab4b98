"""The names of this user's kept clusters, and the folders of their servers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from nbdist.clusters.kept.messages import connected
from nbdist.errors import UsageError
from nbdist.ipc import folders
from nbdist.ipc.private_files import check_folder, read_file, remove_folders
from nbdist.ipc.resources import host_name

__all__ = ["Entry", "check", "claim", "entries", "find", "names_folder", "release"]

SESSION_NAME = "JPY_SESSION_NAME"
"""The variable in which Jupyter gives a kernel the path of its notebook."""


@dataclass(frozen=True)
class Entry:
    """A kept cluster's name, and where its server is."""

    name: str
    host: str
    folder: str
    """The server's folder."""
    pid: int
    """The server's."""

    @property
    def is_here(self) -> bool:
        """Whether the server is on this host."""
        return self.host == host_name()


def claim(name: str | None, server_folder: Path, pid: int) -> Entry:
    """Give a new cluster a name that no other has.

    Args:
        name: The name; None for that of the notebook or of the working folder, with a
            number if it is taken.
        server_folder, pid: The server's.

    Raises:
        UsageError: As for `check`.
        OSError: The names cannot be written.
    """
    for candidate in [name] if name is not None else _default_names():
        entry = Entry(candidate, host_name(), str(server_folder), pid)
        if _wrote(entry):
            return entry
    raise _taken(str(name))


def check(name: str) -> None:
    """Check that a new cluster can have a name.

    Raises:
        UsageError: The name is taken, or has characters other than letters, digits,
            ".", "_" and "-".
        OSError: The names cannot be read.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(f"--name {name!r}: expected letters, digits, '.', '_' and '-'")
    if find(name) is not None:
        raise _taken(name)


def _taken(name: str) -> UsageError:
    return UsageError(
        f"--name {name}: a kept cluster has this name already: %dist_attach {name} "
        "attaches to it, and %dist_clusters lists all"
    )


def entries() -> list[Entry]:
    """The kept clusters of this user, by name, on this host and on others.

    The names and files of those that have ended are removed.
    """
    found = []
    for path in sorted(names_folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Entry(**json.loads(read_file(path))))
    ended = [entry for entry in found if entry.is_here and not _listens(entry)]
    for entry in ended:
        remove_folders(Path(entry.folder))
        _path(entry.name).unlink(missing_ok=True)
    return [entry for entry in found if entry not in ended]


def find(name: str) -> Entry | None:
    """The kept cluster with a name; None if there is none."""
    return next((entry for entry in entries() if entry.name == name), None)


def release(entry: Entry) -> None:
    """Remove a name and the server's files, once the server has ended.

    Another cluster may have the name meanwhile, and then keeps it.
    """
    remove_folders(Path(entry.folder))
    entries()


def _listens(entry: Entry) -> bool:
    """Whether the server of a cluster on this host listens. It may not answer."""
    try:
        connected(Path(entry.folder)).close()
    except OSError:
        return False
    return True


def _default_names() -> Iterator[str]:
    """The name of the notebook or of the working folder, then with numbers from 2."""
    title = Path(os.environ.get(SESSION_NAME, "")).stem or Path(folders.name()).name
    base = re.sub(r"[^\w-]+", "-", title).strip("-") or "cluster"
    yield base
    for number in itertools.count(2):
        yield f"{base}-{number}"


def _wrote(entry: Entry) -> bool:
    """Write an entry. Returns False if the name is taken."""
    # A link is made in one step, so that no reader sees half of the file.
    beside = names_folder() / f".{os.urandom(8).hex()}.part"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(entry), file)
        os.link(beside, _path(entry.name))
    except FileExistsError:
        return False
    finally:
        beside.unlink()
    return True


def _path(name: str) -> Path:
    return names_folder() / f"{name}.json"


def names_folder() -> Path:
    """The folder of the names, of mode 0700, which only this user can read.

    Raises:
        OSError: It cannot be made, or belongs to another user.
    """
    from jupyter_core.paths import jupyter_runtime_dir

    folder = Path(jupyter_runtime_dir()) / "nbdist"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return check_folder(folder)
