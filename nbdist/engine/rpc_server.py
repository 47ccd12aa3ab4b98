"""Answers the notebook's requests. Each request calls an endpoint of this package.

There are two channels. The main thread answers the requests of the "shell" channel in
turn. The control thread answers the requests of the "control" channel, also while the
main thread is busy. Every request gets a reply, with the function's value or its error.
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
    endpoints.DESCRIBE,
    endpoints.VARIABLES,
}
"""Endpoints that call methods of the user's objects, such as `__repr__`. A thread of
their own answers them in turn, because they may take long and the control thread must
still receive an interrupt."""
_inspections: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
PACKAGE = str(Path(__file__).parents[1])

_gates: list[Gate] = []


def answer_on(kernel: Any) -> None:
    """Answer requests on both channels of an ipykernel kernel.

    Must be called before the kernel starts to receive.
    """
    _add_gate(kernel, kernel.shell_stream, "shell")
    _add_gate(kernel, kernel.control_stream, "control")
    threading.Thread(
        target=_answer_inspections, name="nbdist-inspect", daemon=True
    ).start()
    kernel.shell_handlers[REQUEST] = lambda stream, ident, message: _answer_main(
        kernel, stream, ident, message
    )
    kernel.control_handlers[REQUEST] = lambda stream, ident, message: _answer_control(
        kernel, stream, ident, message
    )
    # ipykernel's hooks enable SIGINT before and after a handler, in its bookkeeping.
    # `engine.interrupts` decides when SIGINT is enabled.
    kernel.pre_handler_hook = lambda: None
    kernel.post_handler_hook = lambda: None


def refused() -> int:
    """The number of messages that this rank has refused."""
    return refusals(_gates)


def _add_gate(kernel: Any, stream: Any, channel: str) -> None:
    """Admit only authentic messages to a channel, each of them once. See `Gate`."""
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
        # Any error becomes the reply, because the notebook waits for a reply.
        status, frames = "error", serialization.dumps(describe(error))
    finally:
        end_forked_child()
        rank.activity = None
    _reply(kernel, stream, ident, message, status, frames)


async def _answer_control(kernel: Any, stream: Any, ident: Any, message: Any) -> None:
    content = message["content"]
    if content["target"] in RUNS_USER_CODE:
        loop = asyncio.get_running_loop()

        def inspect_and_reply() -> None:
            outcome = _outcome(content["target"], message["buffers"])
            loop.call_soon_threadsafe(_reply, kernel, stream, ident, message, *outcome)

        _inspections.put(inspect_and_reply)
        return
    frames: list[Any]
    try:
        status, frames = "ok", await _call(content["target"], message["buffers"])
    except Exception as error:  # noqa: BLE001 - as in `_answer_main`
        status, frames = "error", serialization.dumps(describe(error))
    _reply(kernel, stream, ident, message, status, frames)


def _outcome(target: str, buffers: list[Any]) -> tuple[str, list[Any]]:
    """Call a function that is not a coroutine; the status and frames of its reply."""
    try:
        args, kwargs = serialization.loads([bytearray(frame) for frame in buffers])
        return "ok", serialization.dumps(function_of(target)(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - as in `_answer_main`
        return "error", serialization.dumps(describe(error))


def _answer_inspections() -> None:
    while True:
        _inspections.get()()


async def _call(target: str, buffers: list[Any]) -> list[Any]:
    args, kwargs = serialization.loads([bytearray(frame) for frame in buffers])
    value = function_of(target)(*args, **kwargs)
    if inspect.isawaitable(value):
        value = await value
    return serialization.dumps(value)


def function_of(target: str) -> Callable[..., Any]:
    """The function that an endpoint names."""
    module, _, name = target.partition(":")
    if not module.startswith("nbdist.engine."):
        raise ValueError(f"{target!r} is not a function of nbdist.engine")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def describe(error: BaseException) -> tuple[str, str, list[str]]:
    """(class, message, traceback lines) of an error, without nbdist's first frames."""
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
        "broken": world.current().broken,
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
