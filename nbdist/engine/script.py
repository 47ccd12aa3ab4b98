"""A rank without a notebook: `nbdist.init()` under a plain `mpiexec` or `torchrun`."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nbdist.engine import torch_group, torchrun_bootstrap, world
from nbdist.errors import WrongProcess
from nbdist.ipc.launch_environment import is_launched_by_mpi, is_launched_by_torchrun
from nbdist.ipc.prctl import die_with_parent

__all__ = ["init"]


def init() -> None:
    """Join the world that `mpiexec` or `torchrun` made. Every rank must call, once.

    Afterwards nbdist's collectives and torch.distributed work as in a cell, so that a
    cell's code runs in a script unchanged. An existing default process group is kept.
    On a rank of a notebook's cluster, and when called again, this does nothing.

    Raises:
        WrongProcess: No launcher has started this process, or torchrun has started
            ranks on other hosts.
        StartError: Under torchrun, MPI did not start.
    """
    if world.is_joined():
        return
    if is_launched_by_torchrun():
        folder = torchrun_bootstrap.join_mpi()
        here = world.join()
    else:
        here = _join_launched()
        here.publish_environment()
        folder = _make_shared_folder(here)
    if not dist.is_initialized():
        torch_group.start(folder, _owns_gpu(here))
    _end_together()


def _join_launched() -> world.World:
    if not is_launched_by_mpi():
        raise WrongProcess(
            "nbdist.init() joins the ranks of a launcher: start the script with "
            "mpiexec -n 4 python train.py, or torchrun --nproc-per-node 4 train.py"
        )
    # A fault-tolerant mpiexec can end while ranks still wait for a dead one.
    die_with_parent()
    return world.join()


def _make_shared_folder(here: world.World) -> Path:
    """Make a folder that all ranks of this host use. It is removed at the end."""
    folder = tempfile.mkdtemp(prefix="nbdist-") if here.rank == 0 else None
    if folder is not None:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(here.comm.bcast(folder))


def _owns_gpu(here: world.World) -> bool:
    """Select this rank's GPU. Returns False if the host has fewer GPUs than ranks."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < here.local_size:
        return False
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return True


# -- the end ---------------------------------------------------------------------------
#
# MPI_Finalize waits for every rank. A rank that fails must not call it, because others
# may wait for this rank in a collective. It ends all ranks instead.

_status = 0
"""The exit code of this process, once it is known."""


def _end_together() -> None:
    """End all ranks when this one fails by an error or by `sys.exit(code)`.

    Under torchrun, torchrun ends the other ranks. `raise SystemExit(code)` is not
    detected.
    """
    sys.excepthook = partial(_end_by_error, sys.excepthook)
    sys.exit = _exit
    atexit.register(_end_by_status, os.getpid())


def _end_by_error(
    show: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show the error, and end all ranks."""
    show(kind, error, trace)
    _end(1)


def _end_by_status(pid: int) -> None:
    if _status and os.getpid() == pid:  # not in a child that was forked
        _end(_status)


def _end(status: int) -> NoReturn:
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    if not torchrun_bootstrap.has_joined():
        MPI.COMM_WORLD.Abort(status)
    os._exit(status)


class _Exit(SystemExit):
    """Records the exit code when the interpreter reads it at its end.

    A handler reads the code from a Python frame. The interpreter has no frame then.
    """

    def __getattribute__(self, name: str) -> Any:
        global _status
        value = super().__getattribute__(name)
        if name == "code" and sys._getframe().f_back is None:
            _status = value if isinstance(value, int) else int(value is not None)
        return value


def _exit(status: Any = None, /) -> NoReturn:
    """Replaces `sys.exit`."""
    if threading.current_thread() is threading.main_thread():
        raise _Exit(status)
    raise SystemExit(status)  # a thread ends silently only with this class
