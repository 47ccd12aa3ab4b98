"""Many deaths in a row, each of a random rank at a random moment."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest
from elastic_training import STEPS, prepare, weights

from nbdist.clusters.cluster import Cluster
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
            # The survivors were released from one call or from two successive calls.
            assert max(counts) - min(counts) <= 1
            cluster.execute("reduced = 0")


KILLS = 50
EPOCHS = 100
LONG_TRAINING = """
@nbdist.elastic.run(max_restarts=100)
def train_long(state):
    ddp = DDP(state.model)
    while state.sampler.epoch < epochs:
        for indices in state.sampler:
            step_of(state, ddp, indices)
            state.commit()
            time.sleep(pause_s)
        assert sorted(state.seen) == list(range(240))
        state.seen = []
        state.sampler.end_epoch()
        state.commit()

state = make_state()
train_long(state)
"""


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_training_survives_fifty_kills(tmp_path: Path) -> None:
    chance = random.Random(1)
    with Cluster(n=4, device="cpu", threads=1) as cluster:
        prepare(cluster, tmp_path)
        cluster.push(epochs=EPOCHS, pause_s=0.0)
        cluster.execute(LONG_TRAINING, timeout_s=600)
        reference = weights(cluster)[0]
        cluster.push(pause_s=0.01)

        notes: list[str] = []
        cluster.on_note = notes.append
        over = threading.Event()

        def kill_again_and_again() -> None:
            for count in range(KILLS):
                if over.wait(chance.uniform(0.0, 0.5)):
                    return
                os.kill(chance.choice(cluster.ranks).pid, signal.SIGKILL)
                while len(notes) <= count and not over.wait(0.005):
                    pass

        killer = threading.Thread(target=kill_again_and_again)
        killer.start()
        try:
            cluster.execute(LONG_TRAINING, timeout_s=1800)
        finally:
            over.set()
            killer.join()
        assert len(notes) == KILLS
        assert cluster["state.step"] == [EPOCHS * STEPS] * 4
        for weight in weights(cluster):
            assert (weight - reference).abs().max() < 1e-5
