"""Files that are written by one rank, whole or not at all, and read by all."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from nbdist.errors import SaveError, WrongProcess

if TYPE_CHECKING:
    from nbdist.collectives import Group

__all__ = ["load", "save", "write_atomically", "write_on_rank_0"]

MapLocation = torch.device | str | dict[str, str] | Callable[[Any, str], Any] | None


def write_atomically(
    path: str | os.PathLike[str],
    write: Callable[[BinaryIO], object],
    *,
    mode: int | None = None,
) -> None:
    """Replace a file by what `write` writes; a reader sees the old one or the new one.

    It is written beside the file, brought to the disk, and only then given its name.
    So a crash, of this process or of the machine, leaves one of the two whole. Several
    processes may do so at once; the last one stays.

    Args:
        path: in a folder that exists.
        write: gets the open file. When it raises, the old file is left as it was.
        mode: of the file; None for what the umask leaves of 0o666. Until the file has
            its name, only this user can read it.
    """
    target = Path(path)
    # A random name, opened with O_EXCL and O_NOFOLLOW: in a folder that others can
    # write to, nobody can put a file or a link in its place.
    descriptor, part = tempfile.mkstemp(".part", f".{target.name}.", target.parent)
    beside = Path(part)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fchmod(descriptor, 0o666 & ~_umask() if mode is None else mode)
            os.fsync(descriptor)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def save(obj: object, path: str | os.PathLike[str]) -> None:
    """Save an object as `torch.save` does: rank 0 writes its own, the others wait.

    Every rank must call; in a script without ranks, this process writes. When this
    returns, the file is whole and on the disk; see `write_atomically`. For state that
    is divided among ranks, as FSDP's is, take torch.distributed.checkpoint.

    Args:
        obj: such as a model's `state_dict()`. Only rank 0's is looked at.
        path: taken on rank 0; a relative one begins where the notebook is.

    Raises:
        SaveError: rank 0 could not write; raised on every rank, with the reason.
    """
    group = _group()

    def write() -> None:
        write_atomically(path, lambda file: torch.save(obj, file))

    def send(problem: str | None) -> str | None:
        if group is None:
            return problem
        from nbdist.collectives import broadcast_object

        told: str | None = broadcast_object(problem, 0, group=group)
        return told

    write_on_rank_0(path, write, 0 if group is None else group.rank, send)


def write_on_rank_0(
    path: str | os.PathLike[str],
    write: Callable[[], None],
    rank: int,
    send: Callable[[str | None], str | None],
) -> None:
    """Have rank 0 write a file; on each rank, return once it is there.

    Every rank must call.

    Args:
        path: for the error.
        write: called on rank 0 alone.
        rank: this process's.
        send: gives every rank what rank 0 gives it.

    Raises:
        SaveError: rank 0 could not write; raised on every rank, with the reason.
    """
    problem, cause = None, None
    if rank == 0:
        try:
            write()
        # The others must learn of it, whatever pickling or the disk has raised.
        except Exception as error:  # noqa: BLE001
            cause = error
            problem = f"{os.fspath(path)} was not saved: {_reason(error)}"
    problem = send(problem)
    if problem is not None:
        raise SaveError(problem) from cause


def load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    *,
    weights_only: bool = True,
) -> Any:
    """Load what `save` or `torch.save` has written. Any rank may call, alone too.

    Args:
        path: each rank reads it.
        map_location: as for `torch.load`. None brings tensors that were saved from a
            GPU to this rank's own GPU, and to the CPU where it has none.
        weights_only: refuse anything but tensors and plain containers. A file that may
            hold any object can run any code when it is loaded: pass False only for a
            file that you trust.
    """
    where = _own_device if map_location is None else map_location
    return torch.load(path, map_location=where, weights_only=weights_only)


def _own_device(storage: Any, location: str) -> Any:
    if location.startswith("cuda") and torch.cuda.is_available():
        return storage.cuda(torch.cuda.current_device())
    return storage


def _group() -> Group | None:
    """The ranks; None in a process that is none.

    Importing the collectives starts MPI, so a process that has not done it is no rank.
    """
    if "nbdist.collectives" not in sys.modules:
        return None
    from nbdist.collectives import default_group

    try:
        return default_group()
    except WrongProcess:
        return None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _umask() -> int:
    """This process's umask. To ask with `os.umask` would change it for a moment."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Bring a folder's new name for a file to the disk, where folders can be synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
