"""One process's part of a run."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from nbdist.cluster.ipp_client import Answer, Exchange
from nbdist.errors import RankDied
from nbdist.wire import ElasticCall, Notice, RankInfo

__all__ = ["Part"]

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
