"""The first messages of a connection that comes up late are lost, and sent again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from nbdist import CellError, Cluster
from nbdist.clusters.ipp_client import Exchange, IppClient
from nbdist.ipc import endpoints

DIE = "import os\nif rank == 1: os.kill(os.getpid(), 9)"
SUM = "x = torch.ones(5) * (rank + 1); nbdist.all_reduce(x); print(int(x[0]))"


@pytest.fixture(params=["request", "output"])
def lost(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Loses the first greeting of each engine, or its output; counts the greetings."""
    greetings: Counter[str] = Counter()
    send = IppClient.send

    def send_or_lose(
        client: IppClient, engine_uuid: str, target: str, *args: Any, **options: Any
    ) -> Exchange:
        if target != endpoints.GREET:
            return send(client, engine_uuid, target, *args, **options)
        greetings[engine_uuid] += 1
        if greetings[engine_uuid] > 1:
            return send(client, engine_uuid, target, *args, **options)
        if request.param == "request":
            return Exchange(engine_uuid, options["on_output"])
        exchange = send(client, engine_uuid, target, *args, **options)
        monkeypatch.setattr(exchange, "output", lambda _message: None)
        return exchange

    monkeypatch.setattr(IppClient, "send", send_or_lose)
    return greetings


def test_lost_messages_delay_a_start_and_a_replacement(lost: Counter) -> None:
    with Cluster(n=2, device="cpu", on_failure="replace") as cluster:
        assert sorted(lost.values()) == [2, 2]
        with pytest.raises(CellError, match="rank 1 was replaced"):
            cluster.execute(DIE)
        results = cluster.execute(SUM)
        assert [result.stdout.strip() for result in results] == ["3", "3"]
        assert sorted(lost.values()) == [2, 2, 2]
        assert cluster.status()[0]["what"] is None
        client = cluster._live().client
        assert not client._client._exchanges, "no greeting is waited for"
        assert not any(each is None for each in client._client.direct.values())
