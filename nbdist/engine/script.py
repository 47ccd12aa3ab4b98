"""A rank without a notebook: the world of a plain `mpiexec` or `torchrun`."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import torch.distributed as dist

from nbdist.collectives import launched_without_mpi
from nbdist.engine import torch_group, world
from nbdist.engine.script_end import end_together
from nbdist.engine.torchrun_bootstrap import join_mpi
from nbdist.errors import WrongProcess
from nbdist.ipc.device_assignment import launched_rank
from nbdist.ipc.prctl import die_with_parent

__all__ = ["init"]


def init() -> None:
    """Join the world that `mpiexec` or `torchrun` made. Every rank must call, once.

    Afterwards nbdist's collectives and torch.distributed work as they do in a cell, so
    that a cell's code moves to a script unchanged; a default process group that the
    script has made before stays as it is. On a rank of a notebook's cluster, and when
    called again, this does nothing.

    Raises:
        WrongProcess: No launcher has started this process, or torchrun has started
            some on other hosts.
        StartError: Under torchrun, MPI did not start.
    """
    if world.is_joined():
        return
    if launched_without_mpi():
        folder = join_mpi()
        here = world.join()
    else:
        here = _join_launched()
        here.publish_environment()
        folder = _meeting_place(here)
    if not dist.is_initialized():
        torch_group.start(folder, _owns_gpu(here))
    end_together()


def _join_launched() -> world.World:
    try:
        launched_rank()
    except RuntimeError as error:
        raise WrongProcess(
            "nbdist.init() joins the ranks of a launcher: start the script with "
            "mpiexec -n 4 python train.py, or torchrun --nproc-per-node 4 train.py"
        ) from error
    # An mpiexec that tolerates faults ends before the ranks that wait for a dead one.
    die_with_parent()
    return world.join()


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
