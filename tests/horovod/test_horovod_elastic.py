"""Horovod's elastic training continues in one cell when a rank dies."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from nbdist import Cluster
from nbdist.horovod import elastic
from tests.seed import SEED

CELL = """
import os, signal
import torch
import torch.nn.functional as F
from torch import nn
import nbdist.horovod as hvd

hvd.init()
torch.manual_seed(1)
inputs, targets = torch.randn(60, 6), torch.randn(60, 3)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
sampler = hvd.elastic.ElasticSampler(inputs)
state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, sampler=sampler, epoch=0, losses=[]
)
sizes, resets = [], []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])

@hvd.elastic.run
def train(state):
    sizes.append(hvd.size())
    for state.epoch in range(state.epoch, 4):
        batches = torch.utils.data.DataLoader(inputs, 5, sampler=state.sampler)
        order = iter(list(state.sampler))
        for at, batch in enumerate(batches):
            rows = [next(order) for _ in batch]
            if MORTAL and hvd.rank() == 1 and (state.epoch, at) == (1, 2):
                if not os.path.exists(FLAG):
                    open(FLAG, "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
            state.optimizer.zero_grad()
            loss = F.mse_loss(state.model(batch), targets[rows])
            loss.backward()
            state.optimizer.step()
            state.sampler.record_batch(at, len(batch))
            state.losses.append(hvd.allreduce(loss.detach()).item())
            state.commit()
        state.sampler.set_epoch(state.epoch + 1)
    return state.losses

losses = train(state)
weights = model[0].weight.detach().clone()
"""


def test_a_rank_dies_and_is_replaced(tmp_path: Path) -> None:
    flag = str(tmp_path / "died")
    with Cluster(3, device="cpu") as cluster:
        cluster.execute(f"FLAG = {flag!r}\nMORTAL = False", setup=True)
        cluster.execute(CELL)
        expected, weights = cluster["losses"][0], cluster["weights"][0]
        cluster.execute("MORTAL = True")
        cluster.execute(CELL)
        assert Path(flag).exists()
        got = cluster["losses"]
        assert len(expected) == 4 * 4  # 60 samples, 15 in each step
        assert got == [got[0]] * 3
        assert got[0] == pytest.approx(expected, rel=1e-5)
        for each in cluster["weights"]:
            assert abs(each - weights).max() < 1e-6
        assert cluster.pull("sizes", [0]) == [[3, 3]]
        assert cluster.pull("resets", [0]) == [[3]]


class Places:
    """Replaces the world: the number of this process, and the number of processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = (0, 1)
        monkeypatch.setattr(elastic, "rank_and_size", lambda _: self.now)


def test_the_rest_of_an_epoch_is_divided_among_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = Places(monkeypatch)
    for length, first, then in itertools.product((23, 24), (1, 3, 4), (1, 2, 5)):
        seen: list[int] = []
        kept: dict[str, int] = {}
        for rank in range(first):
            places.now = (rank, first)
            sampler = elastic.ElasticSampler(range(length), seed=3)
            sampler.set_epoch(2)
            seen += list(sampler)[:2]
            sampler.record_batch(0, 2)
            kept = sampler.state_dict()
        for rank in range(then):
            places.now = (rank, then)
            sampler = elastic.ElasticSampler(range(length), seed=3)
            sampler.load_state_dict(kept)
            assert len(list(sampler)) == len(sampler)
            seen += sampler
        assert set(seen) == set(range(length))
        assert len(seen) < length + then  # repeated only to be even


SYNC_CELL = """
import torch
import nbdist.horovod as hvd

hvd.init()
model = torch.nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
sampler = hvd.elastic.ElasticSampler(range(16), shuffle=False)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, commits=0)
for step in range(2):
    model(torch.ones(1, 2) * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    sampler.record_batch(step, 2)
    state.commits += 1
    state.commit()
    state.sync()
left, commits = list(sampler), state.commits
weight = model.weight.detach().clone()
"""


def test_sync_divides_the_samples_of_every_rank(cluster: Cluster) -> None:
    cluster.execute(SYNC_CELL)
    left = cluster["left"]
    assert [len(each) for each in left] == [0] * 4  # 16 samples, 8 in each step
    cluster.execute(SYNC_CELL.replace("range(2)", "range(1)"))
    left = cluster["left"]
    assert sorted(itertools.chain(*left)) == list(range(8, 16))
    assert [len(each) for each in left] == [2] * 4
    assert cluster["commits"] == [1] * 4
    weights = cluster["weight"]
    assert all((each == weights[0]).all() for each in weights)


def test_each_rank_gets_as_many_samples_however_few_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = random.Random(SEED)
    for _ in range(200):
        size, length = draw.randint(1, 9), draw.randint(0, 20)
        done = draw.randint(0, length)
        shares = []
        for rank in range(size):
            place = rank, size
            monkeypatch.setattr(elastic, "rank_and_size", lambda _, place=place: place)
            sampler = elastic.ElasticSampler(range(length), seed=3)
            sampler.load_state_dict({"epoch": 1, "processed_num": done})
            shares.append(list(sampler))
            assert len(shares[-1]) == len(sampler)
        said = f"seed {SEED}: {length - done} of {length} on {size}: {shares}"
        assert len({len(share) for share in shares}) == 1, said
        found = set(itertools.chain.from_iterable(shares))
        assert len(found) == length - done, said
