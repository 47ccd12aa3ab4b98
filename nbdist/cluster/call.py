"""One request on several ranks, from its sending to the last rank's answer."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from nbdist.cluster.ipp_client import Answer, Exchange, Link
from nbdist.cluster.observer import Event, Observer
from nbdist.errors import RankDied
from nbdist.ipc import endpoints, serialization
from nbdist.wire import ELASTIC, ElasticCall, Failure, Notice, RankInfo, Verdict

__all__ = ["Run"]

INTERRUPT = endpoints.INTERRUPT
ORDER = endpoints.ELASTIC_ORDER
DECIDE = endpoints.ELASTIC_DECIDE

Message = dict[str, Any]


class Run:
    """Requests to some ranks, and their answers as they come.

    Args:
        targets: The ranks to ask.
        args: Arguments for each rank.
        observer: Sees each event, in each rank's own order.
        needs_all: Whether it is of no use once a rank has died.
    """

    def __init__(
        self,
        link: Link,
        targets: list[RankInfo],
        target: str,
        args: Mapping[int, tuple[object, ...]],
        what: str,
        observer: Observer,
        *,
        needs_all: bool = False,
    ) -> None:
        self._link = link
        self._needs_all = needs_all
        self._stopped = ""
        self._parts = {info.engine_uuid: Part(info) for info in targets}
        self._target, self._args, self._what = target, args, what
        self._observer = observer
        self.restarts = 0
        """How often its elastic run has gone on after a failure."""
        self._begun = self.last_event = time.monotonic()
        self._queue: queue.SimpleQueue[tuple[str, Message | None]] = queue.SimpleQueue()

    def begin(self) -> None:
        """Send the requests."""
        for part in self._parts.values():
            self._send(part, self._args[part.info.rank])

    def _send(self, part: Part, args: tuple[object, ...]) -> None:
        events, uuid = self._queue, part.info.engine_uuid
        part.exchange = self._link.send(
            uuid,
            self._target,
            *args,
            what=self._what,
            on_output=lambda message: self._hear(part, message),
        )

        def ended(_reply: object) -> None:
            part.drop_orders()
            events.put((uuid, None))

        part.exchange.reply.add_done_callback(ended)

    def _hear(self, part: Part, message: Message) -> None:
        """Take a message of a rank's, on the link's thread."""
        if message["msg_type"] == ELASTIC:
            notice: Notice = serialization.loads(message["buffers"])
            if notice.kind == "answered":
                part.settle(notice)
                return
            message = {"msg_type": ELASTIC, "notice": notice}
        self._queue.put((part.info.engine_uuid, message))

    def interrupt(self, outcome: str = "interrupted") -> None:
        """Interrupt this run, and no other, on the ranks that have not answered.

        Args:
            outcome: What observers hear of ranks that end by it.
        """
        self._stopped = outcome
        for part in self._open():
            assert part.exchange is not None
            uuid, name = part.info.engine_uuid, part.exchange.name
            self._link.send(uuid, INTERRUPT, name, control=True)

    # -- what has come of it -------------------------------------------------------

    @property
    def answers(self) -> dict[int, Answer]:
        """What each rank has answered that has, in rank order."""
        parts = self._in_order()
        return {p.info.rank: p.answer for p in parts if p.answer is not None}

    @property
    def died(self) -> dict[int, RankDied]:
        """The ranks that have died before they answered."""
        return {p.info.rank: p.died for p in self._in_order() if p.died is not None}

    @property
    def processes(self) -> dict[int, str]:
        """The engine that is each rank of this run now, in rank order."""
        return {p.info.rank: p.info.engine_uuid for p in self._in_order()}

    @property
    def unfinished(self) -> list[RankInfo]:
        """The ranks that were asked and have not answered, in rank order."""
        return [part.info for part in self._open()]

    @property
    def finished(self) -> bool:
        """Whether some rank has answered, or has died."""
        return any(part.done for part in self._parts.values())

    @property
    def failed(self) -> bool:
        """Whether some rank's cell, or function, has ended with an error."""
        return any(_is_failure(answer) for answer in self.answers.values())

    @property
    def lost(self) -> bool:
        """Whether a rank has died that the request cannot do without."""
        return self._needs_all and bool(self.died)

    @property
    def spent(self) -> bool:
        """Whether the ranks may no longer agree on what was sent in collectives."""
        return bool(self.died) or any(answer.spent for answer in self.answers.values())

    def _in_order(self) -> list[Part]:
        parts = list(self._parts.values())  # another thread may ask meanwhile
        return sorted(parts, key=lambda part: part.info.rank)

    def _open(self) -> list[Part]:
        return [p for p in self._in_order() if p.exchange is not None and not p.done]

    # -- elastic runs --------------------------------------------------------------

    @property
    def elastic(self) -> dict[int, Notice]:
        """The ranks that are in an elastic run, and the last that each said of it."""
        return {p.info.rank: p.elastic for p in self._open() if p.elastic is not None}

    @property
    def paused(self) -> dict[int, Notice]:
        """The ranks that wait in an elastic run to hear what follows."""
        return {r: notice for r, notice in self.elastic.items() if notice.pause}

    @property
    def lost_in(self) -> ElasticCall | None:
        """The elastic run in which all ranks have died; None where not all have.

        A rank that had not reached it, because it was to join, does not count.
        """
        parts = self._in_order()
        calls = {part.lost_in for part in parts} - {None}
        all_dead = all(part.died is not None for part in parts)
        return calls.pop() if all_dead and len(calls) == 1 else None

    def order(self, info: RankInfo, target: str, *args: object) -> Future[Answer]:
        """Have a paused rank's main thread call a function; its answer."""
        part = self._parts[info.engine_uuid]
        notice = part.elastic
        token, future = part.order()
        if notice is not None and not future.done():
            uuid, pause = info.engine_uuid, notice.pause
            self._link.send(uuid, ORDER, pause, token, target, *args, control=True)
        return future

    def decide(self, verdict: Verdict) -> None:
        """End the pauses of all ranks that are in one."""
        for part in self._open():
            notice = part.elastic
            if notice is not None and notice.pause:
                part.elastic = Notice("entered", notice.call)
                uuid = part.info.engine_uuid
                self._link.send(uuid, DECIDE, notice.pause, verdict, control=True)

    def follow(self, infos: Iterable[RankInfo]) -> None:
        """Take the ranks' new numbers. Processes that are not among them are left out.

        They are dead, or were let go: this run goes on without them.
        """
        before = set(self.processes)
        now = {info.engine_uuid: info for info in infos}
        for uuid in list(self._parts):
            if uuid in now:
                self._parts[uuid].info = now[uuid]
            else:
                del self._parts[uuid]
        for rank in sorted(before - {info.rank for info in now.values()}):
            self._observer.take(Event(rank, None, self._elapsed(), outcome="left"))

    def join(self, info: RankInfo) -> None:
        """Ask a rank that was not there when the others were asked."""
        part = self._parts[info.engine_uuid] = Part(info)
        self._send(part, next(iter(self._args.values())))

    # -- waiting -------------------------------------------------------------------

    def wait(self, deadline: float | None, tick_s: float | None = None) -> bool:
        """Handle events until all ranks have answered, or until the deadline.

        Args:
            deadline: On the monotonic clock; None waits for as long as it takes. A
                KeyboardInterrupt ends the wait at once.
            tick_s: Return after this many seconds too, and when a rank has died or
                pauses.

        Returns:
            Whether all ranks have answered.
        """
        end = None if tick_s is None else time.monotonic() + tick_s
        self._find_lost_ends()
        while self._open():
            try:
                uuid, message = self._queue.get(timeout=self._pause(deadline, end))
            except queue.Empty:
                now = time.monotonic()
                if any(t is not None and now >= t for t in (deadline, end)):
                    return False
                continue
            urgent = self._handle(uuid, message)
            self.last_event = time.monotonic()
            if urgent and tick_s is not None:
                return not self._open()
        return True

    def notice(self, text: str) -> None:
        """Tell the observer that no rank gets on, or, with "", that one does again."""
        self._observer.notice(text)

    def _find_lost_ends(self) -> None:
        """Queue again what an interrupt, right after it was taken, has kept from us."""
        for part in self._open():
            if part.exchange is not None and part.exchange.reply.done():
                self._queue.put((part.info.engine_uuid, None))

    def _handle(self, uuid: str, message: Message | None) -> bool:
        """Take one event; whether somebody must act on it."""
        part = self._parts.get(uuid)
        if part is None:  # it was let go
            return False
        if message is None and part.done:  # its end was queued twice
            return False
        urgent = False
        if message is None:
            self._collect(part)
            urgent = part.died is not None
        elif message["msg_type"] == ELASTIC:
            notice = message["notice"]
            part.elastic = None if notice.kind == "left" else notice
            return bool(notice.pause)
        outcome = self._outcome(part) if part.done else "finished"
        event = Event(part.info.rank, message, self._elapsed(), uuid, outcome)
        self._observer.take(event)
        return urgent

    def _outcome(self, part: Part) -> str:
        """How a part has ended, in an `Event`'s words."""
        if part.answer is None:
            return "died"
        if not _is_failure(part.answer):
            return "finished"
        value = part.answer.value
        name = value[0].ename if isinstance(value[0], Failure) else value[0]
        if name == "KeyboardInterrupt":
            return self._stopped or "interrupted"
        # A rank that waited in a collective is released from it by the interrupt.
        released = self._stopped and name in ("CollectiveAborted", "CollectiveError")
        return self._stopped if released else "failed"

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _pause(self, *ends: float | None) -> float | None:
        """Seconds until the first of: an end, or the observer's next turn."""
        now = time.monotonic()
        pauses = [max(0.0, end - now) for end in ends if end is not None]
        due = self._observer.due()
        if due is not None:
            pauses.append(due)
        return min(pauses) if pauses else None

    def _collect(self, part: Part) -> None:
        assert part.exchange is not None
        last, part.elastic = part.elastic, None
        try:
            part.answer = part.exchange.reply.result(timeout=0)
        except RankDied as error:
            part.died = error
            part.lost_in = None if last is None else last.call


def _is_failure(answer: Answer) -> bool:
    """Also a cell's, which is what its request returns."""
    if not answer.ok:
        return True
    value = answer.value
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], Failure)


_tokens = itertools.count(1)


@dataclass
class Part:
    """What a process was asked, and what it has said. Its rank may change meanwhile."""

    info: RankInfo
    exchange: Exchange | None = None
    answer: Answer | None = None
    died: RankDied | None = None
    elastic: Notice | None = None
    """The last it said of the elastic run it is in; None outside one."""
    lost_in: ElasticCall | None = None
    """The elastic run in which it died."""
    _orders: dict[int, Future[Answer]] = field(default_factory=dict)
    """What it was told to do in a pause, and has not done yet."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def done(self) -> bool:
        """Whether it has answered, or has died."""
        return self.answer is not None or self.died is not None

    def order(self) -> tuple[int, Future[Answer]]:
        """A new order: what its answer will be known by, and that answer."""
        token, future = next(_tokens), Future[Answer]()
        with self._lock:
            if self.elastic is None or self.done:
                future.set_exception(RankDied(f"rank {self.info.rank} waits no more"))
            else:
                self._orders[token] = future
        return token, future

    def settle(self, notice: Notice) -> None:
        """An order was carried out. Called on the link's thread."""
        with self._lock:
            future = self._orders.pop(notice.token, None)
        if future is not None:
            future.set_result(Answer(notice.ok, notice.value, False))

    def drop_orders(self) -> None:
        """The process has ended: it carries nothing out any more."""
        with self._lock:
            lost, self._orders = self._orders, {}
        for future in lost.values():
            future.set_exception(RankDied(f"rank {self.info.rank} has ended"))
