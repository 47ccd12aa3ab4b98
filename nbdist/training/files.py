"""Files that are written by one rank, whole or not at all, and read by all."""

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

__all__ = ["load", "save", "write_on_rank_0"]

MapLocation = torch.device | str | dict[str, str] | Callable[[Any, str], Any] | None


def save(obj: object, path: str | os.PathLike[str]) -> None:
    """Save an object as `torch.save` does: rank 0 writes its own, the others wait.

    Every rank must call; in a script without ranks, this process writes. When this
    returns, the file is whole and on the disk; see `ipc.atomic_files`. For state that
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
