"""The main thread of this rank, as the time split sees it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import nbdist
from nbdist.collectives import current_call
from nbdist.engine.cell_names import line_of
from nbdist.engine.rank import this_rank
from nbdist.telemetry.time_split import RunningCode, TimeSplitter

__all__ = ["splitter"]

_NBDIST = Path(nbdist.__file__).parent
_TORCH = Path(torch.__file__).parent
_COMMUNICATION = [
    _NBDIST / "collectives",
    _NBDIST / "horovod",
    _TORCH / "distributed" / "distributed_c10d.py",
    _TORCH / "distributed" / "_functional_collectives.py",
]
_BACKWARD = _TORCH / "autograd"
_DATA = [_NBDIST / "training" / "data", _TORCH / "utils" / "data"]


def splitter() -> TimeSplitter:
    """A time splitter of this rank's main thread."""
    folders = {str(path): "communication" for path in _COMMUNICATION}
    folders |= {str(path): "data" for path in _DATA}
    folders[str(_BACKWARD)] = "backward"
    end = str(_NBDIST / "engine")
    return TimeSplitter(_running_code, line_of, folders, _waits_in_backward, end)


def _running_code() -> RunningCode | None:
    rank = this_rank()
    frame = sys._current_frames().get(rank.main_thread)
    if rank.activity is None or frame is None:
        return None
    return RunningCode(rank.activity, frame)


def _waits_in_backward() -> bool:
    """Whether a collective is under way, and the main thread, the first, sleeps.

    The backward pass runs in the main thread. On a CPU it sleeps only if it waits for a
    collective. On a GPU it may also wait for the GPU: which of both is not known.
    """
    if this_rank().info.device != "cpu" or current_call() is None:
        return False
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    return stat.rpartition(")")[2].split()[0] == "S"
