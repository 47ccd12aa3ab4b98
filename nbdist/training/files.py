"""Files that rank 0 writes and all ranks read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nbdist.errors import SaveError, WrongProcess
from nbdist.ipc.atomic_files import write_atomically

if TYPE_CHECKING:
    from nbdist.collectives import Group

__all__ = ["load", "own_device", "save", "write_on_rank_0"]

MapLocation = torch.device | str | dict[str, str] | Callable[[Any, str], Any] | None


def save(obj: object, path: str | os.PathLike[str]) -> None:
    """Save rank 0's object as `torch.save` does, while the other ranks wait.

    Every rank must call. A process that is not a rank writes the file itself. When this
    returns, the file is complete and on the disk. A reader never sees a part of it. For
    sharded state, such as FSDP's, use `torch.distributed.checkpoint`.

    Args:
        obj: an object such as a model's `state_dict()`, with tensors on any device.
            Other ranks' objects are ignored.
        path: the file. Other ranks' paths are ignored. A relative path begins in the
            notebook's folder.

    Raises:
        SaveError: rank 0 could not write. Every rank raises it, with the reason.
    """
    group = _group()

    def write() -> None:
        write_atomically(path, lambda file: torch.save(obj, file))

    def send(problem: str | None) -> str | None:
        if group is None:
            return problem
        from nbdist.collectives import broadcast_object

        shared: str | None = broadcast_object(problem, 0, group=group)
        return shared

    write_on_rank_0(path, write, 0 if group is None else group.rank, send)


def write_on_rank_0(
    path: str | os.PathLike[str],
    write: Callable[[], None],
    rank: int,
    send: Callable[[str | None], str | None],
) -> None:
    """Write a file on rank 0; return on each rank once it is written.

    Every rank must call.

    Args:
        path: the file, which the error names.
        write: writes the file. It is called on rank 0 only.
        rank: the rank of this process.
        send: broadcasts rank 0's argument, and returns it on every rank.

    Raises:
        SaveError: rank 0 could not write. Every rank raises it, with the reason.
    """
    problem, cause = None, None
    if rank == 0:
        try:
            write()
        # Every error must reach the other ranks, also one of pickling.
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
    """Load a file that `save` or `torch.save` has written. Any rank may call alone.

    Args:
        path: the file, which each rank reads.
        map_location: as for `torch.load`. None loads tensors that were saved from a GPU
            to this rank's GPU, or to the CPU if this rank has no GPU.
        weights_only: refuse anything but tensors and plain containers. A file with
            other objects can run any code when it is loaded: pass False only for a file
            that you trust.
    """
    where = own_device if map_location is None else map_location
    return torch.load(path, map_location=where, weights_only=weights_only)


def own_device(storage: Any, location: str) -> Any:
    """Where a rank loads a storage, as `map_location` of `torch.load`.

    A storage that any rank has saved from its GPU is loaded to this rank's own GPU, or
    to the CPU if it has none.
    """
    if location.startswith("cuda") and torch.cuda.is_available():
        return storage.cuda(torch.cuda.current_device())
    return storage


def _group() -> Group | None:
    """The default group; None in a process that is not a rank.

    Importing the collectives starts MPI. A process that has not imported them is not a
    rank, and must not start MPI here.
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
