"""The main thread of this rank, as the time split sees it."""

from __future__ import annotations

import bdb
import os
import pdb
import stat
from pathlib import Path

import torch

import nbdist
from nbdist.collectives import current_call
from nbdist.collectives.call_timing import gpu_timer
from nbdist.engine.cell_names import line_of
from nbdist.engine.rank import this_rank
from nbdist.telemetry.proc_files import ProcFile
from nbdist.telemetry.time_split import RunningCode, TimeSplitter

__all__ = ["splitter"]

_NBDIST = Path(nbdist.__file__).parent
_TORCH = Path(torch.__file__).parent
_FOLDERS = {
    _NBDIST / "collectives": "communication",
    _NBDIST / "horovod": "communication",
    _TORCH / "distributed" / "distributed_c10d.py": "communication",
    _TORCH / "distributed" / "_functional_collectives.py": "communication",
    _NBDIST / "training" / "data": "data",
    _TORCH / "utils" / "data": "data",
    _TORCH / "autograd": "backward",
    _TORCH / "serialization.py": "files",
    _NBDIST / "engine" / "standard_input.py": "input",
    _NBDIST / "engine" / "debugger.py": "debugger",
    Path(pdb.__file__): "debugger",
    Path(bdb.__file__): "debugger",
}
# Numbers of system calls in which a thread waits for something outside of the process.
_SYSTEM_CALLS: dict[str, dict[str, tuple[int, ...]]] = {
    "x86_64": {
        "descriptor": (0, 1, 17, 18, 19, 20, 40, 295, 296),  # read, write, ...
        "files": (2, 74, 75, 82, 87, 162, 257, 277, 326),  # open, fsync, rename, ...
        "sleep": (35, 230),
        "select": (23, 270),  # Python 3.10 sleeps in it
        "outside": (7, 42, 43, 44, 45, 46, 47, 61, 232, 247, 271, 281),
    },
    "aarch64": {
        "descriptor": (63, 64, 65, 66, 67, 68, 71, 69, 70),
        "files": (35, 38, 56, 81, 82, 83, 84, 276, 285),
        "sleep": (101, 115),
        "select": (72,),
        "outside": (22, 73, 95, 202, 203, 206, 207, 211, 212, 260),
    },
}
_KINDS = {
    number: kind
    for kind, numbers in _SYSTEM_CALLS.get(os.uname().machine, {}).items()
    for number in numbers
}


def splitter() -> TimeSplitter:
    """A time splitter of this rank's main thread."""
    thread = f"/proc/self/task/{os.getpid()}"  # the first thread has the process's id
    system_call, status = ProcFile(f"{thread}/syscall"), ProcFile(f"{thread}/stat")
    return TimeSplitter(
        _running_code,
        line_of,
        {str(path): kind for path, kind in _FOLDERS.items()},
        blocked_in=lambda: _blocked_in(system_call),
        waits_in_backward=lambda: _waits_in_backward(status),
        device_share=gpu_timer.share,
        end=str(_NBDIST / "engine"),
    )


def _running_code() -> RunningCode | None:
    rank = this_rank()
    if rank.activity is None or not (frames := rank.frames()):
        return None
    return RunningCode(rank.activity, frames)


def _blocked_in(system_call: ProcFile) -> str:
    """What the main thread waits for in a system call.

    This is "files", "sleep" or "outside", or "" if it runs or its call is another one:
    the threads of a computation wait for each other in many ways.
    """
    try:
        words = system_call.read().split()
        number, first = int(words[0]), int(words[1], 16)
    except (ValueError, IndexError):  # it runs; or this kernel does not tell
        return ""
    kind = _KINDS.get(number, "")
    if kind == "descriptor":
        return "files" if _is_file(first) else "outside"
    if kind == "select":
        kind = "sleep" if first == 0 else "outside"
    # The wait for a GPU may be one for a descriptor.
    return "" if kind == "outside" and this_rank().info.device != "cpu" else kind


def _is_file(descriptor: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:  # it was closed
        return False


def _waits_in_backward(status: ProcFile) -> bool:
    """Whether a collective is under way, and the main thread sleeps.

    The backward pass runs in the main thread. On a CPU it sleeps only if it waits for a
    collective. On a GPU it may also wait for the GPU: which of both is not known.
    """
    if this_rank().info.device != "cpu" or current_call() is None:
        return False
    return status.read().rpartition(b")")[2].split()[:1] == [b"S"]
