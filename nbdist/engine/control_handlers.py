"""Requests that a rank answers while its main thread is busy or blocked.

These functions run in the kernel's control thread. They inspect and interrupt the main
thread, and never wait for it.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from types import FrameType
from typing import Any

from nbdist.collectives import (
    calls_made,
    current_call,
    release_calls,
    release_calls_with,
)
from nbdist.engine import rpc_server, world
from nbdist.engine.cell_names import line_of
from nbdist.engine.rank import this_rank
from nbdist.errors import CollectiveAborted
from nbdist.wire import CollectiveCall, ProgressSnapshot

__all__ = [
    "complete",
    "end",
    "interrupt",
    "memory",
    "progress",
    "release",
    "release_from",
    "stack",
    "status",
    "waiting",
    "where",
]


def status() -> dict[str, Any]:
    """What this rank is busy with, for how many seconds, and its memory.

    `what`, `seconds` and `where` are None while it is idle. `refused` is the number of
    messages that were not authentic.
    """
    rank = this_rank()
    activity = rank.activity
    return {
        "info": rank.info,
        "what": activity.what if activity else None,
        "seconds": time.monotonic() - activity.since if activity else None,
        "where": where() if activity else None,
        "memory": memory(),
        "refused": rpc_server.refused(),
    }


def memory() -> dict[str, int | None]:
    """Bytes of memory: `resident` in this process, and more on a GPU.

    `reserved` and `allocated` are those of torch's allocator, and `limit` is its cap.
    `total` and `used` are the card's, by all processes; `process` is the part of this
    process, as the driver counts it.
    """
    import psutil
    import torch

    sizes: dict[str, int | None] = {"resident": psutil.Process().memory_info().rss}
    info = this_rank().info
    if info.device_uuid is not None and torch.cuda.is_initialized():
        from nbdist.telemetry.probes import process_memory
        from nbdist.training.memory import look

        now = look(torch.device(info.device))
        sizes |= {
            "reserved": now.held,
            "allocated": now.tensors,
            "total": now.total,
            "used": now.used,
            "limit": now.limit,
            "process": process_memory(info.device_uuid, os.getpid()),
        }
    return sizes


def where() -> str:
    """Where the main thread is: the collective that it is in, or the line of its cell.

    While it pickles or unpickles a value, that is said before the line.
    """
    step = this_rank().step
    return f"{step}, {_position()}" if step else _position()


def _position() -> str:
    call = current_call()
    if call is not None:
        return call.description
    for frame in _main_frames():
        line = line_of(frame.f_code.co_filename, frame.f_lineno)
        if line:
            return line
    for frame in _main_frames():
        return f"{frame.f_code.co_filename} line {frame.f_lineno}"
    return "ended"


def waiting() -> CollectiveCall | None:
    """The collective that this rank is in, with the ranks that take part."""
    return current_call()


def progress() -> ProgressSnapshot:
    """Where this rank is, so that two answers tell whether it has got on."""
    call = current_call()
    counts = calls_made(), this_rank().recorder.steps
    # One that waits in a collective goes round in a loop of ours.
    frames = [] if call else [(id(f.f_code), f.f_lasti) for f in _main_frames()]
    return ProgressSnapshot(where(), call, hash((*counts, *frames)))


def release(reason: str) -> None:
    """Release the main thread from the call that it waits in, with an error."""
    release_calls(CollectiveAborted(reason))
    if current_call() is None:
        world.current().release()  # it may wait in a call of mpi4py or NCCL


def release_from(dead: list[int], reason: str) -> None:
    """Release the main thread from calls with dead ranks, now and later."""
    release_calls_with(dead, reason)
    world.current().release()


def stack() -> str:
    """The Python stack of the main thread as text, outermost call first."""
    frame = sys._current_frames().get(this_rank().main_thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def complete(token: str, line: str, cursor: int) -> list[str]:
    """Completions of the token that ends at the cursor in this line."""
    shell = this_rank().shell
    # `complete` leaves out what jedi finds. Without jedi, it inspects the objects.
    shell.Completer.use_jedi = False
    _text, matches = shell.complete(token, line, cursor)
    return [str(match) for match in matches]


def end() -> None:
    """End this process. The other ranks go on."""
    this_rank().output.close()
    os._exit(0)


def interrupt(request: str | None = None) -> None:
    """Raise KeyboardInterrupt in one request, or in the one that runs for None."""
    this_rank().interrupts.interrupt(request)


def _main_frames() -> list[FrameType]:
    """The main thread's frames, innermost first."""
    frame = sys._current_frames().get(this_rank().main_thread)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames
