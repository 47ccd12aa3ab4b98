"""A rank without a notebook: the world of a plain `mpiexec -n 4 python train.py`."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from nbdist.engine import torch_group, world
from nbdist.engine.place import launched_rank
from nbdist.errors import WrongProcess

__all__ = ["init"]


def init() -> None:
    """Join the world that an MPI launcher made. Every rank must call, once.

    Afterwards nbdist's collectives and torch.distributed work as they do in a cell, so
    that a cell's code moves to a script unchanged. On a rank of a notebook's cluster,
    and when called again, this does nothing.

    Raises:
        WrongProcess: No MPI launcher has started this process.
    """
    if world.is_joined():
        return
    try:
        launched_rank()
    except RuntimeError as error:
        raise WrongProcess(
            "nbdist.init() joins the ranks of an MPI launcher: start the script with "
            "mpiexec -n 4 python train.py"
        ) from error
    here = world.join()
    here.publish_environment()
    torch_group.start(_meeting_place(here), _owns_gpu(here))


def _meeting_place(here: world.World) -> Path:
    """A folder that all ranks of this host know, removed at the end."""
    folder = tempfile.mkdtemp(prefix="nbdist-") if here.rank == 0 else None
    if folder is not None:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(here.comm.bcast(folder))


def _owns_gpu(here: world.World) -> bool:
    """Take this rank's GPU, where there are enough for each rank of the host."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() < here.local_size:
        return False
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return True
