"""The loader in cells, with workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from nbdist import Cluster
from nbdist.errors import CellTimeout
from tests.processes import wait_until

SLOW = """
import time
from torch.utils.data import Dataset
class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 63:
            print("the worker speaks", flush=True)
        time.sleep(0.002)
        return index
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Ranks without steps and child processes of other tests."""
    with Cluster(4, device="cpu") as started:
        yield started


def recorded(cluster: Cluster) -> list[int]:
    """The number of steps of each rank whose waiting time has arrived."""
    history = cluster.collector.history("data_wait_s")
    return [len(history[rank][1]) if rank in history else 0 for rank in range(4)]


def test_a_rank_fetches_with_workers_and_reports_its_waits(cluster: Cluster):
    before = recorded(cluster)
    result = cluster.execute(
        SLOW + "batches = nbdist.loader(Slow(), 4, num_workers=1)\n"
        "got = [i for batch in batches for i in batch.tolist()]"
    )
    assert sorted(itertools.chain(*cluster["got"])) == list(range(64))
    assert sum("the worker speaks" in result[rank].stdout for rank in range(4)) == 1
    assert cluster["batches.waits.steps"] == [4] * 4
    wait_until(lambda: recorded(cluster) == [n + 4 for n in before])
    assert cluster["batches.num_workers"] == [1] * 4


def test_a_rank_that_waits_for_data_is_interrupted(cluster: Cluster):
    cluster.execute(SLOW)
    with pytest.raises(CellTimeout):
        cluster.execute(
            "class Stuck(Slow):\n"
            "    def __getitem__(self, index):\n"
            "        time.sleep(3600)\n"
            "for batch in nbdist.loader(Stuck(), 4, num_workers=1): pass",
            timeout_s=1.5,
        )
    children = "len(__import__('psutil').Process().children())"
    assert cluster.pull(children) == [0] * 4
