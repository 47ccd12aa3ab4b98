"""One request on several ranks, from its sending to the last rank's answer."""

from __future__ import annotations

import itertools
import operator
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.clusters.ipp_client import Answer, Exchange, IppClient
from nbdist.clusters.observer import Event, Observer
from nbdist.clusters.port_clash import port_in_use
from nbdist.errors import RankDied
from nbdist.ipc import endpoints, serialization
from nbdist.ipc.interrupts import defer_interrupts
from nbdist.ipc.locks import Future
from nbdist.wire import (
    ELASTIC,
    INPUT,
    ElasticCall,
    Failure,
    InputReply,
    InputRequest,
    NcclTotal,
    Notice,
    RankInfo,
    Verdict,
)

__all__ = ["Call"]


Message = dict[str, Any]
_Heard = tuple[tuple[str, ...], Message | None]
"""UUIDs of engines, and a message of theirs; None if they have answered or died."""


class Call:
    """A call of one function on some ranks, and their answers as they arrive.

    Args:
        client: Sends the requests.
        targets: The ranks to call the function on.
        target: The endpoint, one of `nbdist.ipc.endpoints`.
        args: The function's arguments on each rank.
        what: Names the call in the ranks' status.
        observer: Receives each event. The events of one rank arrive in their order.
        needs_all: Whether the call fails as soon as a rank has died.
        ends_together: Whether the other ranks are interrupted when one has failed.
    """

    def __init__(
        self,
        client: IppClient,
        targets: list[RankInfo],
        target: str,
        args: Mapping[int, tuple[object, ...]],
        what: str,
        observer: Observer,
        *,
        needs_all: bool = False,
        ends_together: bool = False,
    ) -> None:
        self._client = client
        self._needs_all = needs_all
        self.ends_together = ends_together
        self.ports_in_use: dict[int, int] = {}
        """The port on which a rank's program could not listen, by rank."""
        self._stopped = ""
        self._rank_calls = _by_engine(map(RankCall, targets))
        self._target, self._args, self.what = target, args, what
        self._observer = observer
        self.restarts = 0
        """The number of failures after which its elastic run has continued."""
        self.entered: ElasticCall | None = None
        """The elastic run that a rank entered last; None before the first run."""
        self._begun = self.last_event = time.monotonic()
        self._has_trouble = False
        """Whether a rank has died, failed, or reported a broken group."""
        self._queue: queue.SimpleQueue[_Heard] = queue.SimpleQueue()

    def begin(self) -> None:
        """Send the requests."""
        alike: dict[int, list[RankCall]] = {}
        for rank_call in self._rank_calls.values():
            args = self._args[rank_call.info.rank]
            alike.setdefault(id(args), []).append(rank_call)
        with defer_interrupts():  # an interrupt must not part a request from its wait
            for rank_calls in alike.values():
                self._send(rank_calls, self._args[rank_calls[0].info.rank])

    def _send(self, rank_calls: list[RankCall], args: tuple[object, ...]) -> None:
        """Send one request to several ranks."""
        exchanges = [self._exchange(rank_call) for rank_call in rank_calls]
        self._client.send_all(exchanges, self._target, *args, what=self.what)

    def _exchange(self, rank_call: RankCall) -> Exchange:
        uuid = rank_call.info.engine_uuid
        exchange = Exchange(uuid, lambda message: self._hear(rank_call, message))
        rank_call.exchange = exchange

        def ended(_reply: object) -> None:
            rank_call.drop_orders()
            # Only the last rank wakes the waiting thread, and a failure, which may
            # need an action at once.
            if self._have_all_ended():
                self._queue_ends()
            elif _has_failed(exchange.reply):
                self._queue.put(((uuid,), None))

        exchange.reply.add_done_callback(ended)
        return exchange

    def _have_all_ended(self) -> bool:
        # The last ranks mostly answer last.
        exchanges = (each.exchange for each in reversed(self._rank_calls.values()))
        return all(each is None or each.reply.done() for each in exchanges)

    def _hear(self, rank_call: RankCall, message: Message) -> None:
        """Queue a message of a rank. Runs on the client's thread."""
        if message["msg_type"] == ELASTIC:
            notice: Notice = serialization.loads(message["buffers"])
            if notice.kind == "answered":
                rank_call.settle(notice)
                return
            message = {"msg_type": ELASTIC, "notice": notice}
        elif message["msg_type"] == INPUT:
            request: InputRequest = serialization.loads(message["buffers"])
            if self._stopped:  # nobody waits for this call
                self._client.refuse_input(rank_call.info.engine_uuid, request)
                return
            message = {"msg_type": INPUT, "request": request}
        self._queue.put(((rank_call.info.engine_uuid,), message))

    def interrupt(self, outcome: str = "interrupted") -> None:
        """Interrupt this call on the ranks that have not answered.

        Args:
            outcome: The `Event.outcome` of the ranks that the interrupt ends.
        """
        self._stopped = outcome
        for rank_call in self._open():
            assert rank_call.exchange is not None
            uuid, name = rank_call.info.engine_uuid, rank_call.exchange.name
            self._client.send(uuid, endpoints.INTERRUPT, name, control=True)

    # -- answers -------------------------------------------------------------------

    @property
    def answers(self) -> dict[int, Answer]:
        """The answers so far, by rank, in rank order."""
        return {
            each.info.rank: each.answer
            for each in self._rank_calls.values()
            if each.answer is not None
        }

    @property
    def died(self) -> dict[int, RankDied]:
        """The ranks that died before they answered, in rank order."""
        return {
            each.info.rank: each.died
            for each in self._rank_calls.values()
            if each.died is not None
        }

    @property
    def processes(self) -> dict[int, str]:
        """The UUID of the engine that is now each rank of this call, in rank order."""
        rank_calls = self._rank_calls
        return {each.info.rank: uuid for uuid, each in rank_calls.items()}

    @property
    def unfinished(self) -> list[RankInfo]:
        """The ranks that have neither answered nor died, in rank order."""
        return [rank_call.info for rank_call in self._open()]

    @property
    def succeeded(self) -> bool:
        """Whether all ranks have answered, without an error or a broken group."""
        return not self._has_trouble and not self._open()

    @property
    def failed(self) -> bool:
        """Whether the function or cell has raised on some rank."""
        return any(_is_failure(answer) for answer in self.answers.values())

    @property
    def lost(self) -> bool:
        """Whether a rank that the call needs has died."""
        return self._needs_all and bool(self.died)

    @property
    def broken(self) -> bool:
        """Whether an interrupted collective has broken the ranks' groups."""
        return bool(self.died) or any(answer.broken for answer in self.answers.values())

    @property
    def groups(self) -> dict[str, int]:
        """The number of process groups on each rank that has answered, by engine."""
        return {
            uuid: each.answer.groups
            for uuid, each in self._rank_calls.items()
            if each.answer is not None
        }

    @property
    def nccl(self) -> dict[str, Mapping[str, NcclTotal]]:
        """What each rank that has answered has queued with NCCL, by engine."""
        return {
            uuid: each.answer.nccl
            for uuid, each in self._rank_calls.items()
            if each.answer is not None and each.answer.nccl
        }

    def _open(self) -> list[RankCall]:
        return [
            each
            for each in self._rank_calls.values()
            if each.exchange is not None and not each.done
        ]

    def end_lost_output(self, after_s: float | None = None) -> None:
        """End the wait for ranks that have answered, but whose output has no end.

        Args:
            after_s: As for `Exchange.end_lost_output`.
        """
        for rank_call in self._open():
            assert rank_call.exchange is not None
            rank_call.exchange.end_lost_output(after_s)

    # -- input ---------------------------------------------------------------------

    @property
    def requests(self) -> dict[int, InputRequest]:
        """The request of each rank that waits for a line from the user."""
        return {
            each.info.rank: each.request
            for each in self._open()
            if each.request is not None
        }

    def reply(self, rank: int, answer: InputReply) -> None:
        """Answer a rank's request."""
        rank_call = self._rank_call(rank)
        request, rank_call.request = rank_call.request, None
        assert request is not None
        uuid, target = rank_call.info.engine_uuid, endpoints.INPUT_REPLY
        self._client.send(uuid, target, request.token, answer, control=True)

    def on_end(self, rank: int, callback: Callable[[], None]) -> None:
        """Call back when a rank has ended, on any thread; at once if it has."""
        exchange = self._rank_call(rank).exchange
        assert exchange is not None
        exchange.reply.add_done_callback(lambda _: callback())

    def make_room(self) -> None:
        """Have the observer show all output so far."""
        self._observer.make_room()

    def _rank_call(self, rank: int) -> RankCall:
        return next(e for e in self._rank_calls.values() if e.info.rank == rank)

    # -- elastic runs --------------------------------------------------------------

    @property
    def elastic(self) -> dict[int, Notice]:
        """The last notice of each rank that is in an elastic run."""
        return {
            each.info.rank: each.elastic
            for each in self._open()
            if each.elastic is not None
        }

    @property
    def paused(self) -> dict[int, Notice]:
        """The notice of each rank that has paused in an elastic run."""
        return {r: notice for r, notice in self.elastic.items() if notice.pause}

    @property
    def lost_in(self) -> ElasticCall | None:
        """The elastic run in which all ranks have died; None if a rank has not.

        A rank that was to join the run, and has not entered it, counts only if no other
        rank is left.
        """
        rank_calls = self._rank_calls.values()
        calls = {rank_call.lost_in for rank_call in rank_calls} - {None}
        calls = calls or {rank_call.joins for rank_call in rank_calls} - {None}
        if not rank_calls:  # newcomers died before the request was sent to them
            return self.entered
        all_dead = all(rank_call.died is not None for rank_call in rank_calls)
        return calls.pop() if all_dead and len(calls) == 1 else None

    def order(self, info: RankInfo, target: str, *args: object) -> Future[Answer]:
        """Make a paused rank's main thread call a function; returns a future answer."""
        rank_call = self._rank_calls[info.engine_uuid]
        notice = rank_call.elastic
        token, future = rank_call.order()
        if notice is not None and not future.done():
            uuid, pause = info.engine_uuid, notice.pause
            self._client.send(
                uuid, endpoints.ELASTIC_ORDER, pause, token, target, *args, control=True
            )
        return future

    def decide(self, verdict: Verdict) -> None:
        """Send the verdict that ends the pause of each paused rank."""
        for rank_call in self._open():
            notice = rank_call.elastic
            if notice is not None and notice.pause:
                rank_call.elastic = Notice("entered", notice.call)
                uuid = rank_call.info.engine_uuid
                self._client.send(
                    uuid, endpoints.ELASTIC_DECIDE, notice.pause, verdict, control=True
                )

    def follow(self, infos: Iterable[RankInfo]) -> None:
        """Adopt the numbers that ranks have in a new generation.

        Processes that are not among `infos` have died or left. The call continues
        without them.
        """
        before = set(self.processes)
        now = {info.engine_uuid: info for info in infos}
        staying = [self._rank_calls[uuid] for uuid in self._rank_calls.keys() & now]
        for rank_call in staying:
            rank_call.info = now[rank_call.info.engine_uuid]
        self._rank_calls = _by_engine(staying)
        for rank in sorted(before - {info.rank for info in now.values()}):
            self._observer.take(Event(rank, None, self._elapsed(), outcome="left"))

    def join(self, info: RankInfo, run: ElasticCall) -> None:
        """Send the request to a rank that joins an elastic run of this call."""
        rank_call = RankCall(info, joins=run)
        self._rank_calls = _by_engine([*self._rank_calls.values(), rank_call])
        self._send([rank_call], next(iter(self._args.values())))

    # -- waiting -------------------------------------------------------------------

    def wait(self, deadline: float | None, tick_s: float | None = None) -> bool:
        """Handle events until all ranks have answered or died, or until the deadline.

        A KeyboardInterrupt ends the wait at once.

        Args:
            deadline: On the monotonic clock; None for no limit.
            tick_s: Also return after this many seconds, and when a rank has died or
                paused, or asks the user for a line.

        Returns:
            Whether all ranks have answered or died.
        """
        end = None if tick_s is None else time.monotonic() + tick_s
        self._queue_ends()
        is_open = bool(self._open())
        while is_open:
            try:
                uuids, message = self._queue.get(timeout=self._pause(deadline, end))
            except queue.Empty:
                now = time.monotonic()
                if any(t is not None and now >= t for t in (deadline, end)):
                    return False
                continue
            urgent = False
            for uuid in uuids:
                urgent |= self._handle(uuid, message)
            self.last_event = time.monotonic()
            if message is None:
                is_open = bool(self._open())
            if urgent and tick_s is not None:
                return not is_open
        return True

    def notice(self, text: str) -> None:
        """Pass the observer a text about ranks without progress; "" after progress."""
        self._observer.notice(text)

    def _queue_ends(self) -> None:
        """Queue the ends of ranks that did not wake the waiting thread.

        This includes ends that an interrupt dropped right after they were dequeued.
        """
        ended = tuple(
            rank_call.info.engine_uuid
            for rank_call in self._open()
            if rank_call.exchange is not None and rank_call.exchange.reply.done()
        )
        if ended:
            self._queue.put((ended, None))

    def _handle(self, uuid: str, message: Message | None) -> bool:
        """Handle one event. Returns whether the caller must act on it."""
        rank_call = self._rank_calls.get(uuid)
        if rank_call is None:  # its rank has left
            return False
        if message is None and rank_call.done:  # its end was queued twice
            return False
        urgent = False
        if message is None:
            self._collect(rank_call)
            urgent = rank_call.died is not None
        elif message["msg_type"] == ELASTIC:
            notice = message["notice"]
            self.entered = notice.call
            rank_call.joins = None
            rank_call.elastic = None if notice.kind == "left" else notice
            return bool(notice.pause)
        elif message["msg_type"] == INPUT:
            rank_call.request = message["request"]
            return True
        elif message["msg_type"] == "stream":
            self._find_port_in_use(rank_call.info.rank, message["content"]["text"])
        outcome = self._outcome(rank_call) if self._has_trouble else "finished"
        event = Event(rank_call.info.rank, message, self._elapsed(), uuid, outcome)
        self._observer.take(event)
        return urgent

    def _find_port_in_use(self, rank: int, text: str) -> None:
        port = port_in_use(text)
        if port is not None:
            self.ports_in_use[rank] = port

    def _outcome(self, rank_call: RankCall) -> str:
        """The `Event.outcome` of a rank call."""
        if rank_call.died is not None:
            return "died"
        if rank_call.answer is None or not _is_failure(rank_call.answer):
            return "finished"
        value = rank_call.answer.value
        name = value[0].ename if isinstance(value[0], Failure) else value[0]
        if name == "KeyboardInterrupt":
            return self._stopped or "interrupted"
        # An interrupt also releases ranks that wait in a collective.
        released = self._stopped and name in ("CollectiveAborted", "CollectiveError")
        return self._stopped if released else "failed"

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _pause(self, *ends: float | None) -> float | None:
        """Seconds until the first of these times, or until the observer is due."""
        now = time.monotonic()
        pause = self._observer.due()
        for end in ends:
            if end is not None:
                left = max(0.0, end - now)
                pause = left if pause is None else min(pause, left)
        return pause

    def _collect(self, rank_call: RankCall) -> None:
        assert rank_call.exchange is not None
        last, rank_call.elastic = rank_call.elastic, None
        try:
            answer = rank_call.exchange.reply.result(timeout=0)
        except RankDied as error:
            rank_call.died = error
            rank_call.lost_in = None if last is None else last.call
            self._has_trouble = True
        else:
            rank_call.answer = answer
            if _is_failure(answer):
                self._has_trouble = True
                for text in _texts_of(answer):
                    self._find_port_in_use(rank_call.info.rank, text)
            self._has_trouble |= answer.broken
        rank_call.done = True


def _by_engine(rank_calls: Iterable[RankCall]) -> dict[str, RankCall]:
    """Rank calls by their engines' UUIDs, in rank order.

    The dictionary is replaced, never changed, because two threads read it.
    """
    in_order = sorted(rank_calls, key=operator.attrgetter("info.rank"))
    return {each.info.engine_uuid: each for each in in_order}


def _has_failed(reply: Future[Answer]) -> bool:
    return reply.exception() is not None or _is_failure(reply.result())


def _is_failure(answer: Answer) -> bool:
    """Whether an answer is an error. A cell's error is the value of its answer."""
    if not answer.ok:
        return True
    value = answer.value
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], Failure)


def _texts_of(answer: Answer) -> tuple[str, ...]:
    """What a failure says about the error of a cell."""
    if not answer.ok:
        return ()
    failure = answer.value[0]
    return failure.evalue, *failure.traceback


_tokens = itertools.count(1)


@dataclass
class RankCall:
    """The call on one process. The process's rank may change during the call."""

    info: RankInfo
    joins: ElasticCall | None = None
    """The elastic run that the process joins; None if it was there at the beginning."""
    exchange: Exchange | None = None
    answer: Answer | None = None
    died: RankDied | None = None
    done: bool = False
    """Whether the process has answered or died."""
    elastic: Notice | None = None
    """The last notice from its elastic run; None outside an elastic run."""
    lost_in: ElasticCall | None = None
    """The elastic run in which it died."""
    request: InputRequest | None = None
    """Its open request for a line from the user."""
    _orders: dict[int, Future[Answer]] = field(default_factory=dict)
    """The future answers to orders, by token."""
    _takes_no_orders: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def order(self) -> tuple[int, Future[Answer]]:
        """Register an order. Returns the token of its answer, and the future answer."""
        token, future = next(_tokens), Future[Answer]()
        with self._lock:
            if self.elastic is None or self.done or self._takes_no_orders:
                future.set_exception(RankDied(f"rank {self.info.rank} is not paused"))
            else:
                self._orders[token] = future
        return token, future

    def settle(self, notice: Notice) -> None:
        """Set the answer to an order. Called on the client's thread."""
        with self._lock:
            future = self._orders.pop(notice.token, None)
        if future is not None:
            future.set_result(Answer(notice.ok, notice.value, False))

    def drop_orders(self) -> None:
        """Fail all orders, because the process has ended."""
        with self._lock:
            lost, self._orders = self._orders, {}
            self._takes_no_orders = True  # `done` follows on another thread
        for future in lost.values():
            future.set_exception(RankDied(f"rank {self.info.rank} has ended"))
