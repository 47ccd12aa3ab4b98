"""A rank's first seconds: pin the device, join MPI, start torch, become an engine."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.engine.lifeline import die_with_parent
from nbdist.engine.place import Assignment, launched_rank

if TYPE_CHECKING:
    import torch

__all__ = ["main"]


def main() -> None:
    """Become one rank of the cluster in $NBDIST_RUN_DIR; returns when it ends."""
    die_with_parent()
    run_dir = Path(os.environ["NBDIST_RUN_DIR"])
    _enter(os.environ["NBDIST_WORK_DIR"])
    rank = launched_rank()
    captured = capture_descriptors(run_dir, rank)
    try:
        assignment = Assignment.read(run_dir, rank)
        assignment.pin()
        _become_engine(run_dir, rank, assignment, captured)
    except BaseException as error:
        _report_failure(run_dir, rank, error)
        raise


def capture_descriptors(run_dir: Path, rank: int) -> dict[str, Path]:
    """Send descriptors 1 and 2, also those of C code and child processes, to files."""
    captured = {}
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        path = run_dir / f"rank{rank}.{name}"
        target = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(target, descriptor)
        os.close(target)
        captured[name] = path
    return captured


def _enter(work_dir: str) -> None:
    """Work where the notebook does: relative paths and imports mean the same here."""
    os.chdir(work_dir)
    sys.path[0] = work_dir  # `python -m` has put there where nbdist was found


def _become_engine(
    run_dir: Path, rank: int, assignment: Assignment, captured: dict[str, Path]
) -> None:
    # Only now: these initialise thread pools and look at CUDA_VISIBLE_DEVICES.
    _progress(run_dir, rank, "loading torch")
    import torch

    torch.set_num_threads(assignment.threads)
    _progress(run_dir, rank, "joining MPI")
    from nbdist.engine import torch_group, world

    here = world.join()
    here.publish_environment()
    device = _take_device(assignment)
    _progress(run_dir, rank, "starting torch.distributed")
    owns_gpu = device.type == "cuda" and not assignment.shares_gpu
    torch_group.start(run_dir, owns_gpu)
    _progress(run_dir, rank, "registering")
    from nbdist.engine.engine import run_engine

    run_engine(run_dir, here, assignment, device, captured)


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


def _progress(run_dir: Path, rank: int, stage: str) -> None:
    """Tell the notebook how far this rank is, by a file that is never half written."""
    record = {"pid": os.getpid(), "stage": stage, "time": time.time()}
    _write(run_dir / f"rank{rank}.stage", json.dumps(record))


def _report_failure(run_dir: Path, rank: int, error: BaseException) -> None:
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    _write(run_dir / f"rank{rank}.failed", "".join(lines))
    sys.stderr.flush()


def _write(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.rename(path)
