"""The first request to engines that have registered."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from nbdist.ipc import endpoints
from nbdist.ipc.locks import Future

if TYPE_CHECKING:
    from nbdist.clusters.ipp_client import Answer, Exchange, IppClient

__all__ = ["Greeting"]

FIRST_WAIT_S = 0.5
"""The wait for an answer, before an engine is asked again; it doubles each time."""


class Greeting:
    """Asks engines for what they are until each has answered.

    An engine registers on one connection, and takes requests and sends output on
    others, which may come up later. A message on a connection that is not up is lost
    (ZeroMQ's ROUTER and PUB sockets discard it). A greeting uses these connections.

    Args:
        client: The client.
        engine_uuids: The engines, which have registered.
        on_answer: Called on the client's thread when an engine has answered or ended.
    """

    def __init__(
        self,
        client: IppClient,
        engine_uuids: Collection[str],
        on_answer: Callable[[], None],
    ) -> None:
        self._client = client
        self._on_answer = on_answer
        self._asked: dict[str, list[Exchange]] = {uuid: [] for uuid in engine_uuids}
        self._wait_s = FIRST_WAIT_S
        self._ask(engine_uuids)

    def is_answered(self) -> bool:
        """Whether every engine has answered or ended. Asks again those that have not.

        To be called until it returns True.
        """
        silent = [uuid for uuid in self._asked if not self._replies_of(uuid)]
        if silent and time.monotonic() > self._asked_at + self._wait_s:
            self._wait_s *= 2
            self._ask(silent)
        if not silent:
            for exchanges in self._asked.values():
                for exchange in exchanges:
                    self._client.forget(exchange)  # its request or answer is lost
        return not silent

    def replies(self) -> list[Future[Answer]]:
        """The reply of each engine, in the order of the engines."""
        return [self._replies_of(uuid)[0] for uuid in self._asked]

    def _ask(self, engine_uuids: Collection[str]) -> None:
        self._asked_at = time.monotonic()
        for uuid in engine_uuids:
            exchange = self._client.send(
                uuid, endpoints.GREET, on_output=lambda _message: None
            )
            self._asked[uuid].append(exchange)
            exchange.reply.add_done_callback(lambda _: self._on_answer())

    def _replies_of(self, uuid: str) -> list[Future[Answer]]:
        replies = (exchange.reply for exchange in self._asked[uuid])
        return [reply for reply in replies if reply.done()]
