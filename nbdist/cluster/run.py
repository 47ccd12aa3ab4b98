"""One request on several ranks, from its sending to the last rank's answer."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from typing import Any

from nbdist.cluster.link import Answer, Exchange, Link
from nbdist.cluster.observer import Event, Observer
from nbdist.errors import RankDied
from nbdist.wire import RankInfo

__all__ = ["Run"]

INTERRUPT = "nbdist.engine.agent:interrupt"

Message = dict[str, Any]


class Run:
    """Requests to some ranks, and their answers as they come.

    Args:
        targets: The ranks to ask.
        args: Arguments for each rank.
        observer: Sees each event, in each rank's own order.
    """

    def __init__(
        self,
        link: Link,
        targets: list[RankInfo],
        target: str,
        args: Mapping[int, tuple[object, ...]],
        what: str,
        observer: Observer,
    ) -> None:
        self._link = link
        self._infos = {info.rank: info for info in targets}
        self._target, self._args, self._what = target, args, what
        self._observer = observer
        self._begun = self.last_event = time.monotonic()
        self._queue: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        self.answers: dict[int, Answer] = {}
        self.died: dict[int, RankDied] = {}
        self._exchanges: dict[int, Exchange] = {}

    def begin(self) -> None:
        """Send the requests."""
        for rank, info in self._infos.items():
            self._exchanges[rank] = self._send(rank, info.engine_uuid)

    def _send(self, rank: int, engine_uuid: str) -> Exchange:
        events = self._queue
        exchange = self._link.send(
            engine_uuid,
            self._target,
            *self._args[rank],
            what=self._what,
            on_output=lambda message: events.put((rank, message)),
        )
        exchange.reply.add_done_callback(lambda _reply: events.put((rank, None)))
        return exchange

    def interrupt(self) -> None:
        """Interrupt this run, and no other, on the ranks that have not answered."""
        for info in self.unfinished:
            name = self._exchanges[info.rank].name
            self._link.send(info.engine_uuid, INTERRUPT, name, control=True)

    @property
    def unfinished(self) -> list[RankInfo]:
        """The ranks that were asked and have not answered, in rank order."""
        done = self.answers.keys() | self.died.keys()
        return [self._infos[rank] for rank in self._exchanges if rank not in done]

    @property
    def finished(self) -> bool:
        """Whether some rank has answered, or has died."""
        return bool(self.answers or self.died)

    @property
    def spent(self) -> bool:
        """Whether the ranks may no longer agree on what was sent in collectives."""
        return bool(self.died) or any(answer.spent for answer in self.answers.values())

    def wait(self, deadline: float | None, tick_s: float | None = None) -> bool:
        """Handle events until all ranks have answered, or until the deadline.

        Args:
            deadline: On the monotonic clock; None waits for as long as it takes. A
                KeyboardInterrupt ends the wait at once.
            tick_s: Return after this many seconds too.

        Returns:
            Whether all ranks have answered.
        """
        end = None if tick_s is None else time.monotonic() + tick_s
        while self.unfinished:
            try:
                rank, message = self._queue.get(timeout=self._pause(deadline, end))
            except queue.Empty:
                now = time.monotonic()
                if any(t is not None and now >= t for t in (deadline, end)):
                    return False
                continue
            if message is None:
                self._collect(rank)
            self.last_event = time.monotonic()
            elapsed = self.last_event - self._begun
            self._observer.take(Event(rank, message, elapsed))
        return True

    def notice(self, text: str) -> None:
        """Tell the observer that no rank gets on, or, with "", that one does again."""
        self._observer.notice(text)

    def _pause(self, *ends: float | None) -> float | None:
        """Seconds until the first of: an end, or the observer's next turn."""
        now = time.monotonic()
        pauses = [max(0.0, end - now) for end in ends if end is not None]
        due = self._observer.due()
        if due is not None:
            pauses.append(due)
        return min(pauses) if pauses else None

    def _collect(self, rank: int) -> None:
        try:
            self.answers[rank] = self._exchanges[rank].reply.result(timeout=0)
        except RankDied as error:
            self.died[rank] = error
