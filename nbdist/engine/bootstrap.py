"""A rank's first seconds: pin the device, join MPI, start torch, become an engine."""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.ipc import loopback
from nbdist.ipc.device_assignment import Assignment
from nbdist.ipc.process_files import JOINING, Process

if TYPE_CHECKING:
    import torch

__all__ = ["main"]

MOST_OF_A_SOCKET_PATH = 107
SOCKET_NAME_LENGTH = len("/pymp-abcd1234/listener-abcd1234")


def main() -> None:
    """Become one rank of the cluster in $NBDIST_RUN_DIR; returns when it ends."""
    process = Process.of_arguments(sys.argv[1:])
    _enter(os.environ["NBDIST_WORK_DIR"], os.environ["NBDIST_PATH"])
    try:
        assignment = Assignment.read(process.run_dir, process.rank)
        assignment.pin()
        _keep_sockets_in(process.run_dir)
        _become_engine(process, assignment)
    except BaseException as error:
        process.report_failure(error)
        raise


def _enter(work_dir: str, path: str) -> None:
    """Work where the notebook does: relative paths and imports mean the same here."""
    os.chdir(work_dir)
    sys.path[:] = path.split(os.pathsep)


def _keep_sockets_in(run_dir: Path) -> None:
    """Have multiprocessing's sockets, as of a DataLoader's workers, in our folder.

    A process that is killed leaves them behind; the folder is removed at the end. The
    user's own temporary files stay where they always are.
    """
    if len(str(run_dir)) + SOCKET_NAME_LENGTH > MOST_OF_A_SOCKET_PATH:
        return
    before = tempfile.tempdir
    tempfile.tempdir = str(run_dir)
    try:
        multiprocessing.util.get_temp_dir()  # made once, for the workers too
    finally:
        tempfile.tempdir = before


def _become_engine(process: Process, assignment: Assignment) -> None:
    # Only now: these initialise thread pools and look at CUDA_VISIBLE_DEVICES.
    process.report_stage("loading torch")
    import torch

    torch.set_num_threads(assignment.threads)
    process.report_stage(JOINING)
    from nbdist.engine import torch_group, world

    if process.generation:
        here = world.join_running(process.rank, process.generation)
    else:
        here = world.join()
    loopback.confine(os.getpid())
    here.publish_environment()
    device = _take_device(assignment)
    process.report_stage("starting torch.distributed")
    owns_gpu = device.type == "cuda" and not assignment.shares_gpu
    torch_group.start(process.run_dir, owns_gpu, process.generation)
    process.report_stage("registering")
    from nbdist.engine.kernel import run_engine

    run_engine(process, here, assignment, device)


def _take_device(assignment: Assignment) -> torch.device:
    """This rank's torch device, selected, and capped where it is shared."""
    import torch

    if assignment.gpu_uuid is None:
        return torch.device("cpu")
    if torch.cuda.device_count() != 1:
        raise RuntimeError(
            f"torch sees {torch.cuda.device_count()} GPUs instead of the one with UUID "
            f"{assignment.gpu_uuid}: is torch {torch.__version__} built with CUDA?"
        )
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if assignment.memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(assignment.memory_fraction, device)
    return device
