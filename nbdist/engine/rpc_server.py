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
import builtins
import collections
import contextlib
import contextvars
import functools
import importlib
import inspect
import queue
import socket
import sys
import threading
import traceback
import types
from asyncio import Future
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
import zmq
from jupyter_client.session import extract_header
from tornado.ioloop import IOLoop

from nbdist.engine import comms, cuda_context, debugger, in_flight, torch_group, world
from nbdist.engine.error_text import text_within_bounds
from nbdist.engine.rank import Activity, is_rank, this_rank
from nbdist.engine.user_code import end_forked_child
from nbdist.errors import text_of
from nbdist.ipc import endpoints, serialization
from nbdist.ipc.direct_socket import (
    DirectSocket,
    brief_packet,
    head_of,
    listen,
    path_of,
)
from nbdist.ipc.gpu_threads import use_gpu
from nbdist.ipc.listening import Acceptor
from nbdist.ipc.signed_messages import (
    Gate,
    Opened,
    SignedSession,
    refusals,
)
from nbdist.ipc.stacks import cell_of, is_own_file
from nbdist.wire import REPLY, REQUEST, Outcome

__all__ = ["RankSession", "answer_on", "describe", "function_of", "refused"]

MAY_TAKE_SECONDS = {
    endpoints.COMPLETE,
    endpoints.DESCRIBE,
    endpoints.LEAVES,
    endpoints.LOOK,
    endpoints.PROFILE_COLLECT,
    endpoints.MEMORY_REPORT,
    endpoints.VARIABLES,
}
"""Endpoints that look at all objects, or call methods of the user's, as `__repr__`. A
thread of their own answers them in turn, because the control thread must still receive
an interrupt."""
_inspections: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
METRICS_TIMEOUT_S = 1.0
"""The most seconds that a reply waits for logged values that a GPU still computes."""

T = TypeVar("T")
_import = builtins.__import__

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
    _Shell(kernel, this_rank().run_dir)  # the kernel's stream calls it
    _add_gate(kernel, kernel.control_stream, "control")
    threading.Thread(
        target=_answer_inspections, args=(device,), name="nbdist-inspect", daemon=True
    ).start()
    kernel.control_thread.io_loop.add_callback(_select, device)
    kernel.process_control = functools.partial(_answer_control, kernel)


def _select(device: torch.device) -> None:
    """Make the rank's GPU this thread's. CUDA begins a thread with GPU 0."""
    if device.type == "cuda":
        use_gpu(device)


def refused() -> int:
    """The number of messages that this rank has refused."""
    return refusals(_gates)


def _gate_of(kernel: Any, channel: str) -> Gate:
    """Admits only authentic messages to a channel, each of them once."""
    address = f"{kernel.ident}/{channel}"
    gate = Gate(kernel.session, address, {REQUEST}, _end_process)
    _gates.append(gate)
    return gate


def _add_gate(kernel: Any, stream: Any, channel: str) -> None:
    """Put a gate before the callback of a channel's stream. See `Gate`."""
    gate = _gate_of(kernel, channel)
    receive = stream.on_recv

    def on_recv(callback: Callable[[Any], Any] | None, copy: bool = True) -> None:
        receive(None if callback is None else gate.opening(callback), copy=copy)

    stream.on_recv = on_recv


class _Shell:
    """The shell channel: the controller's socket, and the notebook's direct sockets.

    The requests of all of them are answered one after another, and a reply goes the way
    of its request. The same gate checks all messages, except brief ones.
    """

    def __init__(self, kernel: Any, run_dir: Path) -> None:
        self._kernel = kernel
        self._stream = kernel.shell_stream
        self._gate = _gate_of(kernel, "shell")
        self._client: list[bytes] = []
        """The notebook's address at the controller."""
        self._waiting: collections.deque[Opened] = collections.deque()
        self._is_busy = False
        """Whether a request is begun and not answered."""
        self._context = contextvars.copy_context()
        """The context variables, as the last request has left them."""
        self._directs: list[DirectSocket] = []
        self._task: Future[Any] | None = None  # asyncio keeps a weak reference only
        self._receive = self._stream.on_recv
        self._stream.on_recv = self._on_recv
        self._loop = IOLoop.current()
        self._listener = listen(path_of(run_dir, kernel.ident))
        self._acceptor: Acceptor | None = None
        if self._listener is not None:
            self._acceptor = Acceptor(self._listener)
            self._loop.add_handler(self._listener, self._accept, IOLoop.READ)

    def _on_recv(self, _callback: Any, copy: bool = True) -> None:
        """Replaces the stream's `on_recv`, which the kernel calls as it starts."""
        self._receive(self._gate.opening(self._on_relayed), copy=copy)

    def _on_relayed(self, opened: Opened) -> None:
        for direct in list(self._directs):  # their requests were sent before
            while _or_end(self._take_next, direct):
                pass
        self._client = opened.identities
        self._take(opened)

    def _accept(self, listener: socket.socket, _events: int) -> None:
        assert self._acceptor is not None
        if (connection := self._acceptor.accept()) is not None:
            direct = DirectSocket(connection)
            self._directs.append(direct)
            self._loop.add_handler(direct, self._on_direct, IOLoop.READ)

    def _on_direct(self, direct: DirectSocket, _events: int) -> None:
        _or_end(self._take_next, direct)  # if there are more, the loop calls again

    def _take_next(self, direct: DirectSocket) -> bool:
        """Take one message of a direct socket. Returns whether there was one."""
        if direct not in self._directs:  # an earlier message's code has run the loop
            return False
        try:
            frames = direct.receive()
        except BlockingIOError:
            return False
        if frames is None:
            self._loop.remove_handler(direct)
            self._directs.remove(direct)
            direct.close()
            return False
        opened = self._opened(direct, frames)
        if opened is not None:
            self._take(opened)
        return True

    def _opened(self, direct: DirectSocket, frames: list[memoryview]) -> Opened | None:
        """The request in these frames; None if it is refused."""
        trusted = direct.header
        head = None if trusted is None else head_of(frames)
        if trusted is None or head is None:
            opened = self._gate.opened(frames)
            if opened is None:
                return None
            direct.header = opened.message["header"]
            return opened._replace(direct=direct)
        name, target, what = head
        message = {
            "header": {**trusted, "msg_id": name},
            "msg_id": name,
            "msg_type": REQUEST,
            "parent_header": {},
            "metadata": {},
            "content": {"target": target, "what": what},
            "buffers": frames[2:],
        }
        return Opened([], message, direct, is_brief=True)

    def _take(self, opened: Opened) -> None:
        """Answer a request as soon as the earlier ones are answered."""
        self._waiting.append(opened)
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        while self._waiting and not self._is_busy:
            _or_end(self._begin, self._waiting.popleft())

    def _begin(self, opened: Opened) -> None:
        """Answer a request, in a task from its first `await` that waits.

        A task costs iterations of the event loop, a tenth of a small call each.
        """
        self._is_busy = True
        context = self._context.copy()
        request = _answer(self._kernel, self, opened)

        def end() -> None:
            self._context, self._is_busy = context, False

        def end_task(task: Future[Any]) -> None:
            end()
            if not task.cancelled() and (error := task.exception()) is not None:
                _end_process(error)
            self._answer_waiting()

        try:
            awaited = context.run(request.send, None)
            self._task = _task_of(request, awaited, context)
            self._task.add_done_callback(end_task)
        except StopIteration:  # it has ended
            end()
        except BaseException:
            end()
            raise

    def reply(self, opened: Opened, outcome: Outcome, frames: list[Any]) -> None:
        """Send a reply; it has left when this returns."""
        if opened.direct is not None:
            with contextlib.suppress(OSError):  # too large, or the notebook has ended
                if opened.is_brief:
                    name = opened.message["msg_id"]
                    opened.direct.send(brief_packet((name, *outcome), frames))
                else:
                    _reply(self._kernel, opened.direct, opened, outcome, frames)
                return
        relayed = opened._replace(identities=self._client)
        _reply(self._kernel, self._stream, relayed, outcome, frames)
        self._stream.flush(zmq.POLLOUT)  # the next request may take long


def _task_of(
    begun: Coroutine[Any, Any, Any], awaited: Any, context: contextvars.Context
) -> Future[Any]:
    """A task that continues a coroutine, which has begun and awaits something.

    Python 3.10 lets a task have a copy of a context only.
    """

    async def work() -> None:  # from Python 3.12 on, no generator can be a task
        await _continued(begun, awaited)

    if sys.version_info >= (3, 11):
        return asyncio.get_running_loop().create_task(work(), context=context)
    return context.run(asyncio.ensure_future, work())


@types.coroutine
def _continued(
    begun: Coroutine[Any, Any, Any], awaited: Any
) -> Generator[Any, Any, None]:
    """Continue a coroutine that has begun outside of a task, and awaits something."""
    while True:
        try:
            value = yield awaited
        except BaseException as error:  # noqa: BLE001 - passed on, such as a cancellation
            step = functools.partial(begun.throw, error)
        else:
            step = functools.partial(begun.send, value)
        try:
            awaited = step()
        except StopIteration:
            return


def _or_end(step: Callable[..., T], *arguments: Any) -> T:
    """Do a step of taking or answering a request, or end this process."""
    try:
        return step(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the process ends
        _end_process(error)


def _end_process(error: BaseException) -> NoReturn:
    """End this process, which cannot answer a request.

    User code may have replaced what the answer needs, such as a function of `json`. The
    notebook would wait forever for the answer of a process that lives.
    """
    builtins.__import__ = _import  # the report imports modules
    this_rank().end(f"it can no longer answer the notebook ({text_of(error)})")


async def _answer(kernel: Any, shell: _Shell, opened: Opened) -> None:
    """Answer a request in the main thread."""
    message = opened.message
    kernel.set_parent(opened.identities, message, channel="shell")
    rank = this_rank()
    content = message["content"]
    rank.activity = Activity(content["what"])
    rank.request = message["header"]["msg_id"]
    kernel.session.begin(rank.request)
    frames: list[Any]
    try:
        with rank.interrupts.request(rank.request):
            frames = await _call(content["target"], message["buffers"])
        ok = True
    except BaseException as error:  # noqa: BLE001
        # Any error becomes the reply, because the notebook waits for a reply.
        ok, frames = False, serialization.dumps(describe(error))
        world.current().note_failure()
    finally:
        debugger.end_tracing()
        end_forked_child()
        if rank.interrupts.delivered:  # also if the cell has caught it
            world.current().note_failure()
        rank.activity = None
    # The threads that send output import modules. Where that fails, they end without a
    # word, and the notebook would wait for the end of the output.
    __import__(__name__)
    _flush_streams()
    comms.flush()
    # The last batch of the cell has its step.
    rank.recorder.flush(METRICS_TIMEOUT_S)
    rank.recorder.end_loops()
    has_published = kernel.session.has_published
    outcome = _outcome_now(ok, has_published)
    if changed := in_flight.changed_tallies():
        outcome = outcome._replace(tallies=changed)
    shell.reply(opened, outcome, frames)
    if has_published:
        kernel._publish_status("idle", "shell")


def _flush_streams() -> None:
    """Flush `sys.stdout` and `sys.stderr`, which a cell may have replaced."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a stream of the user's may be closed
            stream.flush()


async def _answer_control(kernel: Any, opened: Opened) -> None:
    """Answer a request in the control thread, as the kernel's `process_control`."""
    message = opened.message
    kernel.set_parent(opened.identities, message, channel="control")
    content = message["content"]
    stream = kernel.control_stream
    if content["target"] in MAY_TAKE_SECONDS:
        loop = asyncio.get_running_loop()

        def inspect_and_reply() -> None:
            ok, frames = _called(content["target"], message["buffers"])
            outcome = _outcome_now(ok)
            loop.call_soon_threadsafe(_reply, kernel, stream, opened, outcome, frames)

        _inspections.put(inspect_and_reply)
        return
    frames: list[Any]
    try:
        ok, frames = True, await _call(content["target"], message["buffers"])
    except Exception as error:  # noqa: BLE001 - as in `_answer`
        ok, frames = False, serialization.dumps(describe(error))
    _reply(kernel, stream, opened, _outcome_now(ok), frames)
    stream.flush(zmq.POLLOUT)


def _called(target: str, buffers: list[Any]) -> tuple[bool, list[Any]]:
    """Call a function that is not a coroutine; whether it succeeded, and its frames."""
    try:
        args, kwargs = serialization.loads([bytearray(frame) for frame in buffers])
        return True, _dumped(function_of(target)(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - as in `_answer`
        return False, serialization.dumps(describe(error))


def _answer_inspections(device: torch.device) -> None:
    _select(device)
    while True:
        _inspections.get()()


async def _call(target: str, buffers: list[Any]) -> list[Any]:
    args, kwargs = serialization.loads([bytearray(frame) for frame in buffers])
    value = function_of(target)(*args, **kwargs)
    if inspect.isawaitable(value):
        value = await value
    return _dumped(value)


def _dumped(value: object) -> list[Any]:
    """A function's value, pickled. It is nbdist's own, and has the user's as bytes.

    Raises:
        Exception: A part of it cannot be pickled. The process ends if even a class of
            nbdist's cannot.
    """
    try:
        return serialization.dumps(value)
    except KeyboardInterrupt:
        raise
    except BaseException:
        _or_end(serialization.dumps, Outcome)
        raise


@functools.cache
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
    while frames is not None and is_own_file(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    name, message, described = text_within_bounds(
        error, frames, lambda shown: [*_formatted(error, shown)]
    )
    if is_rank() and (advice := cuda_context.advice()):
        message, described = f"{message}\n{advice}", [*described, advice]
    return name, message, described


def _formatted(error: BaseException, frames: TracebackType | None) -> Iterator[str]:
    """The lines of a traceback, in which the code of a cell is named "In[7]"."""
    formatted = traceback.TracebackException(type(error), error, frames, compact=True)
    for frame in formatted.stack:
        if (cell := cell_of(frame.filename)) is not None:
            frame.filename = f"In[{cell}]"
    return formatted.format(chain=False)


def _outcome_now(ok: bool, published: bool = False) -> Outcome:
    # Without CUDA no group has used NCCL, and no group need be looked at.
    nccl = torch_group.nccl_calls() if torch.cuda.is_initialized() else {}
    used = {name: total for name, total in nccl.items() if total.number}
    broken, groups = world.current().broken, torch_group.groups_made()
    return Outcome(ok, broken, groups, published, used)


def _reply(
    kernel: Any, stream: Any, opened: Opened, outcome: Outcome, frames: list[Any]
) -> None:
    kernel.session.send(
        stream,
        REPLY,
        outcome._asdict(),
        parent=opened.message,
        ident=opened.identities,
        buffers=frames,
    )
