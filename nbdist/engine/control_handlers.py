"""Requests that a rank answers while its main thread is busy or blocked.

These functions run in the kernel's control thread. They inspect and interrupt the main
thread, and never wait for it.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from typing import Any

from nbdist.collectives import (
    calls_made,
    current_call,
    release_calls,
    release_calls_with,
)
from nbdist.collectives.sync import timeout_clock
from nbdist.engine import comms, rpc_server, torch_group, world
from nbdist.engine.cell_names import line_of
from nbdist.engine.rank import this_rank
from nbdist.errors import CollectiveAborted, CollectiveTimeout, encodable
from nbdist.ipc.stacks import Frame, from_user_code
from nbdist.wire import CollectiveCall, ProgressSnapshot

__all__ = [
    "abort_nccl",
    "complete",
    "describe",
    "end",
    "hold_timeouts",
    "interrupt",
    "memory",
    "progress",
    "release",
    "release_from",
    "release_from_nccl",
    "stack",
    "status",
    "waiting",
    "where",
]


def status() -> dict[str, Any]:
    """This rank's request, the seconds since it began, and the rank's memory.

    `what`, `seconds` and `where` are None while the rank is idle. `refused` is the
    number of messages that were not authentic.
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
    """Bytes of memory by name.

    `resident` is this process's host memory. A rank on a GPU has more entries:
    `reserved` and `allocated` of torch's allocator, and its cap `limit`; `total` and
    `used` of the whole GPU; and `process`, the part that the driver counts for this
    process. A rank whose CUDA context has failed has none of them.
    """
    import psutil
    import torch

    sizes: dict[str, int | None] = {"resident": psutil.Process().memory_info().rss}
    info = this_rank().info
    if info.device_uuid is not None and torch.cuda.is_initialized():
        from nbdist.telemetry.probes import process_memory
        from nbdist.training.memory import device_memory

        with contextlib.suppress(RuntimeError):  # the CUDA context has failed
            now = device_memory(torch.device(info.device))
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
    """The position of the main thread: its collective, or the line of its cell.

    The name of a step, such as the pickling of a value, comes before the position.
    """
    step = this_rank().step
    return f"{step}, {_position()}" if step else _position()


def _position() -> str:
    call = current_call()
    if call is not None:
        return call.description
    for frame in this_rank().frames():
        line = line_of(frame.f_code.co_filename, frame.f_lineno)
        if line:
            return line
    for frame in this_rank().frames():
        return f"{frame.f_code.co_filename} line {frame.f_lineno}"
    return "ended"


def waiting() -> CollectiveCall | None:
    """This rank's current collective, with its members; None if there is none."""
    return current_call()


def progress() -> ProgressSnapshot:
    """This rank's position. Two snapshots differ if the rank has made progress."""
    call = current_call()
    counts = calls_made(), this_rank().recorder.steps
    # A rank that waits in a collective runs a loop, so its frames change all the time.
    frames = [] if call else [(id(f.f_code), f.f_lasti) for f in this_rank().frames()]
    return ProgressSnapshot(where(), call, hash((*counts, *frames)))


def release(reason: str) -> None:
    """Release the main thread from its collective, with an error.

    Args:
        reason: The error's message.
    """
    release_calls(CollectiveAborted(reason))
    if current_call() is None:
        world.current().release()  # it may be in a call of mpi4py or NCCL


def release_from(dead: list[int], reason: str) -> None:
    """Release the main thread from calls with dead ranks, and fail later ones.

    Args:
        dead: World ranks.
        reason: The error's message.
    """
    release_calls_with(dead, reason)
    world.current().release()


def abort_nccl(why: str) -> None:
    """End this rank's collectives of NCCL, because another rank was released.

    A cell that waits in one ends with an error. Another cell continues, and its next
    call of NCCL fails.

    Args:
        why: Why the other rank was released.
    """
    for group, calls in torch_group.nccl_trace().items():
        if not all(call.is_done for call in calls.values()):
            release_from_nccl(group, why)
            return
    world.current().abort_nccl()


def release_from_nccl(
    group: str, why: str, is_late: bool = False, if_waiting: bool = False
) -> bool:
    """Release this rank from a call of NCCL, and end its cell with an error.

    NCCL releases the GPU without a result. The cell must not continue with it.

    Args:
        group: The name of the process group.
        why: Why the call cannot complete.
        is_late: Whether the group's time-out has passed.
        if_waiting: Do nothing if the GPU has completed the group's calls.

    Returns:
        Whether the rank was released.
    """
    if if_waiting and not torch_group.is_waiting(group):
        return False
    rank = this_rank()
    operation = torch_group.nccl_operation(group)
    kind = CollectiveTimeout if is_late else CollectiveAborted
    rank.released = kind(f"released from {operation} by NCCL, at {where()}: {why}")
    rank.interrupts.interrupt(None)  # it is raised when the wait has ended
    world.current().release()
    return True


def stack(everything: bool = False) -> str:
    """The Python stack of the main thread as text, outermost call first.

    Args:
        everything: Begin with the calls that lead to the user's code. If False, the
            stack of a rank that runs no user code is "  idle".
    """
    rank = this_rank()
    frames = [
        Frame(each.filename, each.lineno or 0, each.name, each.line or "")
        for each in traceback.extract_stack(rank.frames()[0])
    ]
    chosen = from_user_code(frames)
    if everything or (rank.activity is not None and not chosen):
        chosen = frames
    return "\n".join(map(str, chosen)) or "  idle"


def complete(token: str, line: str, cursor: int) -> list[str]:
    """Completions of the token that ends at the cursor.

    Args:
        token: The text before the cursor that is to be completed.
        line: The line that holds the cursor.
        cursor: The cursor's position in the line.
    """
    shell = this_rank().shell
    # `complete` does not return jedi's matches. Without jedi, it inspects the objects.
    shell.Completer.use_jedi = False
    completed, matches = shell.complete(token, line, cursor)
    # What is completed ends at the cursor too. It is ".app" of the token "x.app".
    before = token.removesuffix(completed)
    return [
        before + str(match)[max(0, len(completed) - len(token)) :] for match in matches
    ]


def describe(name: str, detail: int) -> dict[str, str]:
    """The signature and the docstring of an object, by media type; {} if none exists.

    Args:
        name: A variable, or attributes of one, such as "model.forward".
        detail: 1 adds the source code.
    """
    try:
        found: dict[str, str] = this_rank().shell.object_inspect_mime(name, detail)
    except KeyError:
        return {}
    return {kind: encodable(text) for kind, text in found.items()}


def end() -> None:
    """End this process. The other ranks continue."""
    this_rank().output.close()
    os._exit(0)


def hold_timeouts(held: bool) -> None:
    """Stop the clock of the collectives' time-outs, or let it run on."""
    timeout_clock.hold(held)


def interrupt(request: str | None = None) -> None:
    """Raise KeyboardInterrupt in a request; None means the current request.

    A widget's callback is interrupted too, because the request may wait for its end.
    """
    interrupts = this_rank().interrupts
    if comms.is_in_callback():
        interrupts.interrupt(None)
    interrupts.interrupt(request)
