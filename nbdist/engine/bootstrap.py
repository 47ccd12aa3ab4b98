"""A rank's first seconds: pin the device, join MPI, start torch, become an engine."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.engine.lifeline import die_with_parent
from nbdist.engine.place import Assignment, launched_rank
from nbdist.engine.witness import go_on_in_child

if TYPE_CHECKING:
    import torch

__all__ = ["main"]


def main() -> None:
    """Become one rank of the cluster in $NBDIST_RUN_DIR; returns when it ends."""
    die_with_parent()
    run_dir = Path(os.environ["NBDIST_RUN_DIR"])
    _enter(os.environ["NBDIST_WORK_DIR"], os.environ["NBDIST_PATH"])
    process = Process.of_arguments(run_dir, sys.argv[1:])
    go_on_in_child(run_dir / f"{process.name}.ending")
    captured = capture_descriptors(run_dir, process.name)
    try:
        assignment = Assignment.read(run_dir, process.rank)
        assignment.pin()
        _become_engine(process, assignment, captured)
    except BaseException as error:
        process.report_failure(error)
        raise


@dataclass(frozen=True)
class Process:
    """Which process this is, in the eyes of those who started it."""

    run_dir: Path
    rank: int
    generation: int
    """Of the world it enters: 0, or a later one that runs already."""

    @classmethod
    def of_arguments(cls, run_dir: Path, arguments: list[str]) -> Process:
        """From `--join RANK GENERATION`, or from the MPI launcher."""
        if arguments[:1] == ["--join"]:
            return cls(run_dir, int(arguments[1]), int(arguments[2]))
        return cls(run_dir, launched_rank(), 0)

    @property
    def name(self) -> str:
        """Of its files in the cluster's folder."""
        suffix = f"-{self.generation}" if self.generation else ""
        return f"rank{self.rank}{suffix}"

    def progress(self, stage: str) -> None:
        """Tell the notebook how far this is, by a file that is never half written."""
        record = {"pid": os.getpid(), "stage": stage, "time": time.time()}
        _write(self.run_dir / f"{self.name}.stage", json.dumps(record))

    def report_failure(self, error: BaseException) -> None:
        """Tell the notebook why this has ended."""
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        _write(self.run_dir / f"{self.name}.failed", "".join(lines))
        sys.stderr.flush()


def capture_descriptors(run_dir: Path, process: str) -> dict[str, Path]:
    """Send descriptors 1 and 2, also those of C code and child processes, to files.

    Descriptor 0 is at its end: nobody can answer to `input()`, and so it fails at once.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    captured = {}
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        path = run_dir / f"{process}.{name}"
        target = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(target, descriptor)
        os.close(target)
        captured[name] = path
    return captured


def _enter(work_dir: str, path: str) -> None:
    """Work where the notebook does: relative paths and imports mean the same here."""
    os.chdir(work_dir)
    sys.path[:] = path.split(os.pathsep)


def _become_engine(
    process: Process, assignment: Assignment, captured: dict[str, Path]
) -> None:
    # Only now: these initialise thread pools and look at CUDA_VISIBLE_DEVICES.
    process.progress("loading torch")
    import torch

    torch.set_num_threads(assignment.threads)
    process.progress("joining MPI")
    from nbdist.engine import torch_group, world

    if process.generation:
        here = world.join_running(process.rank, process.generation)
    else:
        here = world.join()
    here.publish_environment()
    device = _take_device(assignment)
    process.progress("starting torch.distributed")
    owns_gpu = device.type == "cuda" and not assignment.shares_gpu
    torch_group.start(process.run_dir, owns_gpu, process.generation)
    process.progress("registering")
    from nbdist.engine.engine import run_engine

    run_engine(process.run_dir, process.name, here, assignment, device, captured)


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


def _write(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.rename(path)
