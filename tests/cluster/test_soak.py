"""Many deaths in a row, each at a random moment of a random rank."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest

from nbdist.cluster.controller import Cluster
from nbdist.errors import CellError

ROUNDS = 20
REDUCING = """
while True:
    x = torch.full((100_000,), rank + 1.0)
    nbdist.all_reduce(x)
    assert x.eq(10).all()
    reduced += 1
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_world_survives_many_deaths() -> None:
    chance = random.Random(0)
    with Cluster(n=4) as cluster:
        cluster.execute("reduced = 0")
        for _ in range(ROUNDS):
            rank = chance.randrange(4)
            before = [info.pid for info in cluster.ranks]
            killer = threading.Timer(
                chance.uniform(0.0, 1.0), os.kill, (before[rank], signal.SIGKILL)
            )
            killer.start()
            with pytest.raises(CellError, match=f"rank {rank} .* SIGKILL"):
                cluster.execute(REDUCING, timeout_s=120)
            after = [info.pid for info in cluster.ranks]
            assert [r for r in range(4) if after[r] != before[r]] == [rank]
            counts = cluster["reduced"]
            # The survivors were in the same call when they were released, or one apart.
            assert max(counts) - min(counts) <= 1
            cluster.execute("reduced = 0")
