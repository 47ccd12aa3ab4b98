"""Answers the notebook's requests. Each request calls an endpoint of this package.

There are two channels. The main thread answers the requests of the "shell" channel in
turn. The control thread answers the requests of the "control" channel, also while the
main thread is busy. Every request gets a reply, with the function's value or its error.

The dispatch replaces ipykernel's, which publishes two messages for each request, at its
begin and at its end. Here a request is followed by a message only if it has published
output. The message marks the end of the output.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import zmq
from jupyter_client.session import extract_header

from nbdist.engine import cuda_context, torch_group, world
from nbdist.engine.rank import Activity, is_rank, this_rank
from nbdist.engine.user_code import end_forked_child
from nbdist.errors import encodable, message_of
from nbdist.ipc import endpoints, serialization
from nbdist.ipc.signed_messages import Gate, Opened, SignedSession, refusals
from nbdist.wire import REPLY, REQUEST

__all__ = ["RankSession", "answer_on", "describe", "function_of", "refused"]

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


class RankSession(SignedSession):
    """A rank's session, which knows whether the running request has published."""

    _request = ""
    has_published = False
    """Whether a message was sent whose parent is the request that runs."""

    def begin(self, request: str) -> None:
        """Set the running request, by its message id."""
        self._request, self.has_published = request, False

    def send(
        self,
        stream: Any,
        msg_or_type: Mapping[str, Any] | str,
        content: dict[str, Any] | None = None,
        parent: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Build, sign and send a message; arguments as for jupyter_client's Session."""
        if isinstance(msg_or_type, str):
            header = extract_header(parent) if parent else {}
        else:
            header = msg_or_type["parent_header"]
        self.has_published |= header.get("msg_id") == self._request
        return super().send(stream, msg_or_type, content, parent, *args, **options)


def answer_on(kernel: Any, device: torch.device) -> None:
    """Answer requests on both channels of an ipykernel kernel.

    Must be called before the kernel starts to receive. The kernel's session is a
    `RankSession`.

    Args:
        kernel: The kernel.
        device: The rank's device, which is made current in each thread that answers.
    """
    _add_gate(kernel, kernel.shell_stream, "shell")
    _add_gate(kernel, kernel.control_stream, "control")
    threading.Thread(
        target=_answer_inspections, args=(device,), name="nbdist-inspect", daemon=True
    ).start()
    kernel.control_thread.io_loop.add_callback(_select, device)
    kernel.dispatch_shell = functools.partial(_answer_main, kernel)
    kernel.process_control = functools.partial(_answer_control, kernel)


def _select(device: torch.device) -> None:
    """Make the rank's GPU this thread's. CUDA begins a thread with GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def refused() -> int:
    """The number of messages that this rank has refused."""
    return refusals(_gates)


def _add_gate(kernel: Any, stream: Any, channel: str) -> None:
    """Admit only authentic messages to a channel, each of them once. See `Gate`."""
    gate = Gate(kernel.session, f"{kernel.ident}/{channel}", {REQUEST})
    _gates.append(gate)
    receive = stream.on_recv

    def on_recv(callback: Callable[[Any], Any] | None, copy: bool = True) -> None:
        receive(None if callback is None else gate.opening(callback), copy=copy)

    stream.on_recv = on_recv


async def _answer_main(
    kernel: Any, opened: Opened, subshell_id: str | None = None
) -> None:
    """Answer a request in the main thread, as the kernel's `dispatch_shell`."""
    identities, message = opened
    kernel.set_parent(identities, message, channel="shell")
    rank = this_rank()
    content = message["content"]
    rank.activity = Activity(content["what"])
    rank.request = message["header"]["msg_id"]
    kernel.session.begin(rank.request)
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
    _flush_streams()
    has_published = kernel.session.has_published
    stream = kernel.shell_stream
    _reply(kernel, stream, opened, status, frames, has_published)
    if has_published:
        kernel._publish_status("idle", "shell")
    stream.flush(zmq.POLLOUT)  # before the next request, which may take long


def _flush_streams() -> None:
    """Flush `sys.stdout` and `sys.stderr`, which a cell may have replaced."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a stream of the user's may be closed
            stream.flush()


async def _answer_control(kernel: Any, opened: Opened) -> None:
    """Answer a request in the control thread, as the kernel's `process_control`."""
    identities, message = opened
    kernel.set_parent(identities, message, channel="control")
    content = message["content"]
    stream = kernel.control_stream
    if content["target"] in RUNS_USER_CODE:
        loop = asyncio.get_running_loop()

        def inspect_and_reply() -> None:
            outcome = _outcome(content["target"], message["buffers"])
            loop.call_soon_threadsafe(_reply, kernel, stream, opened, *outcome)

        _inspections.put(inspect_and_reply)
        return
    frames: list[Any]
    try:
        status, frames = "ok", await _call(content["target"], message["buffers"])
    except Exception as error:  # noqa: BLE001 - as in `_answer_main`
        status, frames = "error", serialization.dumps(describe(error))
    _reply(kernel, stream, opened, status, frames)
    stream.flush(zmq.POLLOUT)


def _outcome(target: str, buffers: list[Any]) -> tuple[str, list[Any]]:
    """Call a function that is not a coroutine; the status and frames of its reply."""
    try:
        args, kwargs = serialization.loads([bytearray(frame) for frame in buffers])
        return "ok", serialization.dumps(function_of(target)(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - as in `_answer_main`
        return "error", serialization.dumps(describe(error))


def _answer_inspections(device: torch.device) -> None:
    _select(device)
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
    """(class, message, traceback lines) of an error, without nbdist's first frames.

    If this rank's CUDA context has failed, the message and the lines end with advice.
    """
    frames = error.__traceback__
    while frames is not None and _is_ours(frames):
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames, chain=False)
    message, described = message_of(error), [*map(encodable, lines)]
    if is_rank() and (advice := cuda_context.advice()):
        message, described = f"{message}\n{advice}", [*described, advice]
    return type(error).__name__, message, described


def _is_ours(frames: TracebackType) -> bool:
    return frames.tb_frame.f_code.co_filename.startswith(PACKAGE)


def _reply(
    kernel: Any,
    stream: Any,
    opened: Opened,
    status: str,
    frames: list[Any],
    has_published: bool = False,
) -> None:
    content = {
        "status": status,
        "broken": world.current().broken,
        "groups": torch_group.groups_made(),
        "published": has_published,
    }
    kernel.session.send(
        stream,
        REPLY,
        content,
        parent=opened.message,
        ident=opened.identities,
        buffers=frames,
    )
