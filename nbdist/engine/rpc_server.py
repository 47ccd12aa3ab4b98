"""Requests from the notebook: a named function of this package, with arguments.

One message type serves all of them, on two channels: "shell" is answered by the main
thread, in turn; "control" by the control thread, also while the main thread is busy.
A reply always comes: with the function's value, or with the failure.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import queue
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from nbdist.engine import torch_group, world
from nbdist.engine.rank import Activity, this_rank
from nbdist.engine.user_code import end_forked_child
from nbdist.errors import encodable, message_of
from nbdist.ipc import endpoints, serialization
from nbdist.ipc.signed_messages import Gate, refusals
from nbdist.wire import REPLY, REQUEST

__all__ = ["answer_on", "describe", "function_of", "refused"]

RUNS_USER_CODE = {
    endpoints.COMPLETE,
    endpoints.VARIABLES,
}
"""Requests that call methods of the user's objects, such as `__repr__`. These may take
long, so a thread of their own answers them: the control thread must take interrupts."""
_looks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
PACKAGE = str(Path(__file__).parents[1])

_gates: list[Gate] = []


def answer_on(kernel: Any) -> None:
    """Teach an ipykernel kernel our message type, on both of its channels.

    Must be called before the kernel starts to receive.
    """
    _guard(kernel, kernel.shell_stream, "shell")
    _guard(kernel, kernel.control_stream, "control")
    threading.Thread(target=_look_on, name="nbdist-look", daemon=True).start()
    kernel.shell_handlers[REQUEST] = lambda stream, ident, message: _answer_main(
        kernel, stream, ident, message
    )
    kernel.control_handlers[REQUEST] = lambda stream, ident, message: _answer_agent(
        kernel, stream, ident, message
    )
    # ipykernel would let SIGINT through during its own bookkeeping, before and after
    # our handler; engine.interrupts decides instead.
    kernel.pre_handler_hook = lambda: None
    kernel.post_handler_hook = lambda: None


def refused() -> int:
    """How many messages this rank has refused."""
    return refusals(_gates)


def _guard(kernel: Any, stream: Any, channel: str) -> None:
    """Have a channel receive only what is meant for it, and each message once."""
    gate = Gate(kernel.session, f"{kernel.ident}/{channel}", {REQUEST})
    _gates.append(gate)
    receive = stream.on_recv

    def on_recv(callback: Callable[[Any], Any] | None, copy: bool = True) -> None:
        receive(None if callback is None else gate.before(callback), copy=copy)

    stream.on_recv = on_recv


async def _answer_main(kernel: Any, stream: Any, ident: Any, message: Any) -> None:
    rank = this_rank()
    content = message["content"]
    rank.activity = Activity(content["what"])
    rank.request = message["header"]["msg_id"]
    frames: list[Any]
    try:
        with rank.interrupts.request(rank.request):
            frames = await _call(content["target"], message["buffers"])
        status = "ok"
    except BaseException as error:  # noqa: BLE001
        # The boundary: whatever went wrong becomes the answer, so that one comes.
        status, frames = "error", serialization.dumps(describe(error))
    finally:
        end_forked_child()
        rank.activity = None
    _reply(kernel, stream, ident, message, status, frames)


async def _answer_agent(kernel: Any, stream: Any, ident: Any, message: Any) -> None:
    content = message["content"]
    if content["target"] in RUNS_USER_CODE:
        loop = asyncio.get_running_loop()

        def look() -> None:
            outcome = _outcome(content["target"], message["buffers"])
            loop.call_soon_threadsafe(_reply, kernel, stream, ident, message, *outcome)

        _looks.put(look)
        return
    frames: list[Any]
    try:
        status, frames = "ok", await _call(content["target"], message["buffers"])
    except Exception as error:  # noqa: BLE001 - the boundary, as above
        status, frames = "error", serialization.dumps(describe(error))
    _reply(kernel, stream, ident, message, status, frames)


def _outcome(target: str, buffers: list[Any]) -> tuple[str, list[Any]]:
    """Status and frames of a reply, for a function that is no coroutine."""
    try:
        args, kwargs = serialization.loads([bytearray(frame) for frame in buffers])
        return "ok", serialization.dumps(function_of(target)(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - the boundary, as above
        return "error", serialization.dumps(describe(error))


def _look_on() -> None:
    while True:
        _looks.get()()


async def _call(target: str, buffers: list[Any]) -> list[Any]:
    args, kwargs = serialization.loads([bytearray(frame) for frame in buffers])
    value = function_of(target)(*args, **kwargs)
    if inspect.isawaitable(value):
        value = await value
    return serialization.dumps(value)


def function_of(target: str) -> Callable[..., Any]:
    """The function of this package that "module:function" names."""
    module, _, name = target.partition(":")
    if not module.startswith("nbdist.engine."):
        raise ValueError(f"{target!r} is not a function of nbdist.engine")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def describe(error: BaseException) -> tuple[str, str, list[str]]:
    """(class, message, traceback lines) of what went wrong, from the user's code on."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames):
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames, chain=False)
    return type(error).__name__, message_of(error), [*map(encodable, lines)]


def _is_ours(frames: TracebackType) -> bool:
    return frames.tb_frame.f_code.co_filename.startswith(PACKAGE)


def _reply(
    kernel: Any, stream: Any, ident: Any, message: Any, status: str, frames: list[Any]
) -> None:
    content = {
        "status": status,
        "broken": world.current().spent,
        "groups": torch_group.groups_made(),
    }
    kernel.session.send(
        stream,
        REPLY,
        content,
        parent=message,
        ident=ident,
        buffers=frames,
    )
