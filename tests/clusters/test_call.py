"""The elastic run in which a call has lost its ranks, with simulated ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.clusters.call import Call, RankCall
from nbdist.clusters.ipp_client import Exchange
from nbdist.clusters.observer import Quiet
from nbdist.errors import RankDied
from nbdist.ipc import serialization
from nbdist.wire import ELASTIC, ElasticCall, Notice
from tests.processes import HANG_S

RUN = ElasticCall("train", max_restarts=1, min_ranks=1, max_ranks=None, timeout_s=1)


class Client:
    """Keeps the requests, and lets a test answer for the ranks."""

    def __init__(self) -> None:
        self.exchanges: dict[str, Exchange] = {}

    def send_all(
        self, exchanges: list[Exchange], *_args: object, **_more: object
    ) -> None:
        self.exchanges |= {each.engine_uuid: each for each in exchanges}

    def notify(self, uuid: str, kind: str) -> None:
        buffers = serialization.dumps(Notice(kind, RUN))
        self.exchanges[uuid].output({"msg_type": ELASTIC, "buffers": buffers})

    def die(self, uuid: str) -> None:
        self.exchanges[uuid].reply.set_exception(RankDied("killed"))


@pytest.mark.parametrize(
    ("notices", "lost_in"),
    [([], RUN), (["entered"], RUN), (["entered", "left"], None)],
    ids=["not reached", "in it", "left"],
)
def test_a_call_knows_the_run_in_which_its_last_rank_died(
    notices: list[str], lost_in: ElasticCall | None
) -> None:
    client: Any = Client()
    first: Any = SimpleNamespace(engine_uuid="first", rank=0)
    newcomer: Any = SimpleNamespace(engine_uuid="newcomer", rank=0)
    call = Call(client, [first], "function", {0: ()}, "a cell", Quiet())
    call.begin()
    client.notify("first", "entered")
    call.follow([newcomer])
    call.join(newcomer, RUN)
    for kind in notices:
        client.notify("newcomer", kind)
    client.die("newcomer")
    assert call.wait(time.monotonic() + HANG_S)
    assert call.lost_in == lost_in


def test_a_call_knows_the_run_that_a_dead_newcomer_was_to_join() -> None:
    client: Any = Client()
    first: Any = SimpleNamespace(engine_uuid="first", rank=0)
    call = Call(client, [first], "function", {0: ()}, "a cell", Quiet())
    call.begin()
    client.notify("first", "entered")
    assert not call.wait(time.monotonic() + 0.1)
    call.follow([])
    assert call.wait(time.monotonic() + HANG_S)
    assert call.lost_in == RUN


def test_an_order_to_a_rank_that_has_just_ended_is_answered() -> None:
    """The client's thread has dropped the orders, and `done` is not set yet."""
    rank: Any = SimpleNamespace(engine_uuid="rank", rank=0)
    rank_call = RankCall(rank, elastic=Notice("paused", RUN, pause=1))
    _, before = rank_call.order()
    rank_call.drop_orders()
    _, after = rank_call.order()
    for future in (before, after):
        with pytest.raises(RankDied, match="rank 0"):
            future.result(0)
