"""Requests to the ranks through ipyparallel's client."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from ipyparallel import Client
from jupyter_client.session import Session

from nbdist.clusters.comm_receiver import IGNORED, CommReceiver
from nbdist.errors import RankDied
from nbdist.ipc import endpoints, serialization
from nbdist.ipc.direct_socket import (
    DirectSocket,
    brief_packet,
    head_of,
    packet_of,
    path_of,
)
from nbdist.ipc.locks import Future
from nbdist.ipc.signed_messages import (
    Gate,
    Opened,
    SignedSession,
    addressed,
    carefully,
    refusals,
)
from nbdist.wire import (
    COMMS,
    INPUT,
    REFUSED,
    REPLY,
    REQUEST,
    TELEMETRY,
    InputReply,
    InputRequest,
    NcclTotal,
    Outcome,
    Tally,
)

__all__ = ["Answer", "Exchange", "IppClient"]

MOST_AT_ONCE = 100
"""Messages that are received from one socket before the other sockets are polled."""

OUTPUT_TIMEOUT_S = 30.0
"""Seconds without a message after which the rest of a rank's output is lost."""
OUTPUT_LOST = "[the end of this rank's output was lost]\n"

NO_ASKER = "the call has ended or was interrupted"

ENGINES = "connection_reply"
"""The type of the message that lists all engines."""

Message = dict[str, Any]


class Answer(NamedTuple):
    """The reply of an engine."""

    ok: bool
    value: Any
    """The function's result, or (class, message, traceback lines) if it raised."""
    broken: bool
    """Whether a collective of the rank was interrupted, so that its group is broken."""
    groups: int = 0
    """The number of process groups that torch has made on the rank."""
    nccl: Mapping[str, NcclTotal] = {}
    """What the rank has queued with NCCL, by the process group's name."""


class Exchange:
    """One request to one engine, until its reply and all of its output have arrived.

    The client's thread resolves `reply`, with RankDied if the engine ends first.
    """

    def __init__(
        self, engine_uuid: str, on_output: Callable[[Message], None] | None
    ) -> None:
        self.engine_uuid = engine_uuid
        self.name = ""
        """Name of the request, which is unique on its engine; set when it is sent."""
        self.reply: Future[Answer] = Future()
        self.holds_back = False
        """Whether later requests to the engine must follow it through the controller,
        so that they arrive in their order."""
        self._on_output = on_output
        self._answer: Answer | None = None
        # Output arrives on another channel. If there was any, "idle" marks its end.
        self._idle = on_output is None
        self._settling = threading.Lock()
        self._heard_at = time.monotonic()

    @property
    def is_quiet(self) -> bool:
        """Whether nobody takes what the function prints or asks."""
        return self._on_output is None

    @property
    def key(self) -> tuple[str, str]:
        """The request's name, and the session of the engine's messages."""
        return self.name, self.engine_uuid

    def output(self, message: Message) -> None:
        self._heard_at = time.monotonic()
        if message["msg_type"] == "status":
            self._idle |= message["content"]["execution_state"] == "idle"
            self._settle()
        elif self._on_output is not None:
            self._on_output(message)

    def answer(self, outcome: Outcome, frames: Sequence[Any]) -> None:
        ok, value = outcome.ok, None
        try:
            value = serialization.loads([bytearray(frame) for frame in frames])
        except Exception as error:  # noqa: BLE001 - a class's own unpickling may do anything
            ok, value = False, ("TransferError", _cannot_arrive(error), [])
        nccl = {name: NcclTotal(*total) for name, total in outcome.nccl.items()}
        self._answer = Answer(ok, value, outcome.broken, outcome.groups, nccl)
        self._idle |= not outcome.published
        self._heard_at = time.monotonic()
        self._settle()

    def end_lost_output(self, after_s: float | None = None) -> None:
        """End the wait for the rest of the output, if it is lost. Any thread may call.

        User code may have replaced what the rank sends it with.

        Args:
            after_s: Seconds without a message after which it is lost. Default:
                `OUTPUT_TIMEOUT_S`.
        """
        if self._answer is None or self._idle or self._on_output is None:
            return
        limit_s = OUTPUT_TIMEOUT_S if after_s is None else after_s
        if time.monotonic() >= self._heard_at + limit_s:
            content = {"name": "stderr", "text": OUTPUT_LOST}
            self._on_output({"msg_type": "stream", "content": content})
            self._idle = True
            self._settle()

    def fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)

    def _settle(self) -> None:
        with self._settling:
            if self._idle and self._answer is not None and not self.reply.done():
                self.reply.set_result(self._answer)


def _cannot_arrive(error: Exception) -> str:
    return (
        f"the result cannot be unpickled in this process ({type(error).__name__}: "
        f"{error}): return plain values, arrays or tensors"
    )


class IppClient:
    """A connection to the controller, and through it to every engine.

    Args:
        connection_file: Written by the controller.
        on_telemetry: Called with each batch of metrics, on the client's thread.
        timeout_s: Seconds that the controller may take to answer.

    Raises:
        TimeoutError: The controller has not answered.
    """

    def __init__(
        self,
        connection_file: Path,
        on_telemetry: Callable[[Any], None],
        timeout_s: float,
    ) -> None:
        self._client = _Client(
            str(connection_file),
            profile_dir=str(connection_file.parent.parent),
            timeout=timeout_s,
        )
        self._client.run_dir = connection_file.parent.parent
        self._client.on_telemetry = on_telemetry

    def engines(self) -> dict[int, str]:
        """UUID of every registered engine, by ipyparallel's engine id."""
        return {number: self._client._engines[number] for number in self._client.ids}

    @contextlib.contextmanager
    def on_registration(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call back on the client's thread when an engine registers, in a `with` block.

        The controller's notice of an engine is lost if this client connects at the
        same moment. `ask_for_engines` finds such an engine.
        """

        def on_event(_event: Message) -> None:
            callback()

        self._client._registration_callbacks.append(on_event)
        try:
            yield
        finally:
            self._client._registration_callbacks.remove(on_event)

    def ask_for_engines(self) -> None:
        """Have the controller send the list of engines, without a wait."""
        self._client.ask_for_engines()

    def send(
        self,
        engine_uuid: str,
        target: str,
        *args: object,
        what: str = "",
        control: bool = False,
        on_output: Callable[[Message], None] | None = None,
        **kwargs: object,
    ) -> Exchange:
        """Request that one engine call an endpoint.

        Args:
            engine_uuid: The engine.
            target: The endpoint, one of `nbdist.ipc.endpoints`.
            args, kwargs: The endpoint's arguments.
            what: The name of the request in the engine's status.
            control: Send it to the control thread, which answers while the engine is
                busy.
            on_output: Called with each message that the function prints or displays,
                on the client's thread.
        """
        exchange = Exchange(engine_uuid, on_output)
        self.send_all([exchange], target, *args, what=what, control=control, **kwargs)
        return exchange

    def send_all(
        self,
        exchanges: Sequence[Exchange],
        target: str,
        *args: object,
        what: str = "",
        control: bool = False,
        **kwargs: object,
    ) -> None:
        """Request that the engine of each exchange call an endpoint. See `send`.

        The arguments are pickled once.
        """
        content = {"target": target, "what": what or target}
        frames = serialization.dumps((args, kwargs))
        self._client.exchange(exchanges, content, frames, control)

    def refuse_input(self, engine_uuid: str, request: InputRequest) -> None:
        """Refuse a rank's request for a line from the user. Any thread may call."""
        self._client.refuse_input(engine_uuid, request)

    @property
    def tallies(self) -> dict[str, dict[str, Tally]]:
        """What each engine has told of what it has begun, by its UUID and the group.

        `told` counts the replies that have told something.
        """
        return self._client.tallies

    @property
    def told(self) -> int:
        return self._client.told

    def pass_comms_to(self, receiver: CommReceiver) -> None:
        """Pass the messages of the engines' comms on, on the client's thread."""
        self._client.comms = receiver

    @property
    def refused(self) -> int:
        """Number of messages that the notebook and the controller have refused."""
        return refusals(self._client.gates) + self._client.refused_by_controller

    def fail(self, engine_uuid: str, error: RankDied) -> None:
        """Fail every exchange with an engine that has ended."""
        self._client.fail(engine_uuid, error)

    def forget(self, exchange: Exchange) -> None:
        """Wait no longer for the reply."""
        self._client.forget(exchange)

    def close(self) -> None:
        """Close the connection. A second close does nothing."""
        self._client.close(linger=0)


class _Client(Client):  # type: ignore[misc]
    """ipyparallel's client, with a message type for nbdist's requests.

    ipyparallel keeps all output, in quadratic time. This client passes each message on.
    """

    on_telemetry: Callable[[Any], None]
    run_dir: Path

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.direct: dict[str, DirectSocket | None] = {}
        """The direct socket to each engine that has answered once, by its UUID. None if
        the engine cannot be reached so."""
        self._exchanges: dict[tuple[str, str], Exchange] = {}
        """By `Exchange.key`."""
        self._gone: dict[str, RankDied] = {}
        self._exchanges_lock = threading.Lock()
        self.tallies: dict[str, dict[str, Tally]] = {}
        self.told = 0
        self.gates: list[Gate] = []
        self.refused_by_controller = 0
        self.comms: CommReceiver = IGNORED
        super().__init__(*args, **kwargs)

    @property
    def session(self) -> SignedSession:
        return self._session

    @session.setter
    def session(self, session: Session) -> None:
        self._session = SignedSession.like(session)

    def _setup_streams(self) -> None:
        super()._setup_streams()
        for name in self.trait_names():
            if name.endswith("_socket"):
                # Messages that an ended controller has not received must not keep the
                # socket open.
                getattr(self, name).linger = 0
        news = {REFUSED, *self._notification_handlers}
        for stream, types, handle in (
            (self._control_stream, {REPLY}, self._on_reply),
            (self._mux_stream, {REPLY}, self._on_reply),
            (self._iopub_stream, None, self._on_iopub),
            (self._notification_stream, news, self._on_notification),
            (self._query_stream, {ENGINES}, self._on_engines),
        ):
            gate = Gate(self.session, types=types)
            self.gates.append(gate)
            take = gate.opening(_taking(handle))
            stream.on_recv(_draining(stream, take), copy=False)
            if stream is self._mux_stream:
                self._reply_gate = gate
        for stream in (self._task_stream, self._broadcast_stream):
            stream.stop_on_recv()  # unused

    def activate(self, targets: object = "all", suffix: str = "") -> None:
        """Do nothing. ipyparallel registers its %px magics here."""

    def exchange(
        self,
        exchanges: Sequence[Exchange],
        content: Message,
        frames: list[Any],
        control: bool,
    ) -> None:
        """Send one request to the engines of the exchanges.

        On the shell channel it is sent directly, if the engine accepts it. The client's
        thread sends it through the controller to the other engines.
        """
        channel = "control" if control else "shell"
        stream = self._control_stream if control else self._mux_stream
        name = self.session.msg_id
        for exchange in exchanges:
            exchange.name = name
        with self._exchanges_lock:
            held_back = {
                each.engine_uuid for each in self._exchanges.values() if each.holds_back
            }
            self._exchanges |= {(name, each.engine_uuid): each for each in exchanges}
            gone = [
                (exchange, self._gone[exchange.engine_uuid])
                for exchange in exchanges
                if exchange.engine_uuid in self._gone
            ]

        uuids = [exchange.engine_uuid for exchange in exchanges]
        request = _Request(self.session, name, content, frames, uuids, channel)
        relayed = []
        for exchange in exchanges:
            uuid = exchange.engine_uuid
            direct = None if control or uuid in held_back else self.direct.get(uuid)
            if direct is not None:
                with contextlib.suppress(OSError):  # too large, or the engine has ended
                    direct.send(
                        request.packet if direct.header else request.signed_packet
                    )
                    continue
            exchange.holds_back = not control
            relayed.append(uuid.encode())

        def relay() -> None:
            for exchange, error in gone:
                self._fail(exchange, error)
            for ident in relayed:
                stream.send_multipart([ident, *request.signed], copy=False)

        if gone or relayed:
            self._io_loop.add_callback(relay)

    def _connect_directly(self, engine_uuid: str) -> None:
        """Connect to an engine that has answered, and so listens."""
        direct = None
        with contextlib.suppress(AttributeError, OSError):  # as in `listen`
            direct = DirectSocket.connect(path_of(self.run_dir, engine_uuid))
            take = functools.partial(self._on_direct, engine_uuid)
            self._io_loop.add_handler(direct, take, self._io_loop.READ)
        self.direct[engine_uuid] = direct

    def _on_direct(self, uuid: str, direct: DirectSocket, _events: int) -> None:
        self._take_next(uuid, direct)  # if there are more, the loop calls again

    def _take_next(self, uuid: str, direct: DirectSocket) -> bool:
        """Take a reply of an engine's direct socket. Returns whether there was one."""
        try:
            frames = direct.receive()
        except BlockingIOError:
            return False
        if frames is None:
            self.direct.pop(uuid, None)  # the next answer connects again
            self._io_loop.remove_handler(direct)
            direct.close()
            return False
        carefully(self._take_direct, uuid, direct, frames)
        return True

    def _take_direct(
        self, uuid: str, direct: DirectSocket, frames: list[memoryview]
    ) -> None:
        head = None if direct.header is None else head_of(frames)
        if head is not None:
            name, *outcome = head
            self._take_reply(name, uuid, Outcome(*outcome), frames[2:])
        elif (opened := self._reply_gate.opened(frames)) is not None:
            if opened.message["header"]["session"] == uuid:
                direct.header = opened.message["header"]
            self._on_reply(opened.message)

    def fail(self, engine_uuid: str, error: RankDied) -> None:
        with self._exchanges_lock:
            self._gone[engine_uuid] = error
            lost = [e for e in self._exchanges.values() if e.engine_uuid == engine_uuid]
        for exchange in lost:
            # On the client's thread, which also receives answers: one of them is first.
            self._io_loop.add_callback(self._fail, exchange, error)
        self._io_loop.add_callback(self.comms.ended, engine_uuid)

    def _fail(self, exchange: Exchange, error: RankDied) -> None:
        uuid = exchange.engine_uuid
        if (direct := self.direct.get(uuid)) is not None:
            while self._take_next(uuid, direct):  # the engine may have answered at last
                pass
        exchange.fail(error)
        self.forget(exchange)

    def forget(self, exchange: Exchange) -> None:
        with self._exchanges_lock:
            self._exchanges.pop(exchange.key, None)

    def _exchange_of(self, message: Message) -> Exchange | None:
        parent = message["parent_header"].get("msg_id", "")
        with self._exchanges_lock:
            return self._exchanges.get((parent, message["header"]["session"]))

    def _forget_finished(self, exchange: Exchange) -> None:
        if exchange.reply.done():
            self.forget(exchange)

    def _on_reply(self, message: Message) -> None:
        parent = message["parent_header"].get("msg_id", "")
        uuid = message["header"]["session"]
        outcome = Outcome(**message["content"])
        self._take_reply(parent, uuid, outcome, message["buffers"])

    def _take_reply(
        self, name: str, uuid: str, outcome: Outcome, frames: Sequence[Any]
    ) -> None:
        if outcome.tallies:  # of any reply, because a rank tells each change once
            table = {key: Tally(*tally) for key, tally in outcome.tallies.items()}
            self.tallies[uuid] = {**self.tallies.get(uuid, {}), **table}
            self.told += 1
        with self._exchanges_lock:
            exchange = self._exchanges.get((name, uuid))
        if exchange is not None:
            exchange.answer(outcome, frames)
            self._forget_finished(exchange)
            if uuid not in self.direct:
                self._connect_directly(uuid)

    def _on_notification(self, message: Message) -> None:
        if message["msg_type"] == REFUSED:
            self.refused_by_controller = message["content"]["count"]
        else:
            self._notification_handlers[message["msg_type"]](message)

    def ask_for_engines(self) -> None:
        send = self.session.send
        self._io_loop.add_callback(send, self._query_stream, "connection_request")

    def _on_engines(self, message: Message) -> None:
        self._update_engines(message["content"]["engines"])
        for callback in list(self._registration_callbacks):
            callback({"event": "register"})

    def _on_iopub(self, message: Message) -> None:
        if message["msg_type"] == TELEMETRY:
            self.on_telemetry(serialization.loads(message["buffers"]))
            return
        if message["msg_type"] == COMMS:
            batch = serialization.loads(message["buffers"])
            self.comms.receive(message["header"]["session"], batch)
            return
        exchange = self._exchange_of(message)
        if message["msg_type"] == INPUT and (exchange is None or exchange.is_quiet):
            request = serialization.loads(message["buffers"])
            self.refuse_input(message["header"]["session"], request)
        elif exchange is not None:
            exchange.output(message)
            self._forget_finished(exchange)

    def refuse_input(self, engine_uuid: str, request: InputRequest) -> None:
        answer = InputReply(refusal=NO_ASKER, is_interrupted=True)
        content = {"target": endpoints.INPUT_REPLY, "what": endpoints.INPUT_REPLY}
        frames = serialization.dumps(((request.token, answer), {}))
        self.exchange([Exchange(engine_uuid, None)], content, frames, control=True)


class _Request:
    """A request to some engines, in each form in which it is sent.

    Args:
        session: Signs it.
        name: Its message id.
        content, frames: The endpoint, and the arguments.
        engine_uuids, channel: Where it may be received.
    """

    def __init__(
        self,
        session: SignedSession,
        name: str,
        content: Message,
        frames: list[Any],
        engine_uuids: Sequence[str],
        channel: str,
    ) -> None:
        self._session, self._name = session, name
        self._content, self._frames = content, frames
        self._engine_uuids, self._channel = engine_uuids, channel

    @functools.cached_property
    def signed(self) -> list[Any]:
        """The frames that the controller carries."""
        message = self._session.msg(
            REQUEST,
            self._content,
            header={**self._session.msg_header(REQUEST), "msg_id": self._name},
            metadata=addressed(
                *(f"{uuid}/{self._channel}" for uuid in self._engine_uuids)
            ),
        )
        return self._session.frames(message, self._frames)

    @functools.cached_property
    def signed_packet(self) -> list[Any]:
        """The packet for a direct socket whose other end does not trust it yet."""
        return packet_of(self.signed)

    @functools.cached_property
    def packet(self) -> list[Any]:
        """The packet for a direct socket whose other end trusts it."""
        head = self._name, self._content["target"], self._content["what"]
        return brief_packet(head, self._frames)


def _taking(handle: Callable[[Message], None]) -> Callable[[Opened], None]:
    return lambda opened: handle(opened.message)


def _draining(
    stream: Any, callback: Callable[[list[Any]], None]
) -> Callable[[list[Any]], None]:
    """A ZMQStream's callback that also receives the messages that have arrived since.

    A stream runs the event loop once for each message, and the answers of several ranks
    arrive together.
    """

    def on_message(frames: list[Any]) -> None:
        callback(frames)
        for _ in range(MOST_AT_ONCE):
            try:
                more = stream.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            callback(more)

    return on_message
