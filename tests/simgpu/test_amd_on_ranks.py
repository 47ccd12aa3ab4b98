"""Ranks on GPUs that AMD's library describes.

No HIP can be simulated: the stand-in of tests/amd describes the simulated GPUs, which
CUDA numbers as HIP would.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import CellError, Cluster
from nbdist.clusters.hosts import amd_gpus
from tests.gpu_marks import GPUS, simulated
from tests.processes import wait_until

STAND_IN = Path(__file__).parents[1] / "amd"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    simulated,
    pytest.mark.skipif(GPUS != 2, reason="needs two GPUs"),
]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(amd_gpus, "torch_is_built_for_them", lambda: True)
    monkeypatch.syspath_prepend(STAND_IN)
    paths = [str(STAND_IN), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    with Cluster(2, threads=1) as cluster:
        yield cluster
    sys.modules.pop("amdsmi", None)


def test_ranks_train_on_the_gpus_and_the_driver_is_read(cluster: Cluster) -> None:
    uuids = ["GPU-0123456789abcdef", "GPU-fedcba9876543210"]
    assert [info.device_uuid for info in cluster.ranks] == uuids
    cluster.execute(
        "import os, torch\n"
        "assert os.environ['HIP_VISIBLE_DEVICES'] == '0,1'\n"
        "assert str(device) == f'cuda:{rank}'\n"
        "x = torch.full((1000,), rank + 1.0, device=device)\n"
        "nbdist.all_reduce(x)\n"
    )
    assert cluster.pull("x[0].item()") == [3.0, 3.0]

    def read() -> bool:
        devices = cluster.collector.snapshot().devices
        return len(devices) == 2 and all(
            (samples[-1].utilisation, samples[-1].power) == (97.0, 540.0)
            and samples[-1].memory_total == 196_592 * 2**20
            for samples in devices.values()
        )

    wait_until(read)


def test_a_replaced_rank_gets_the_gpu_of_the_lost_one(cluster: Cluster) -> None:
    before = cluster.ranks[1]
    with pytest.raises(CellError, match="rank 1"):
        cluster.execute(
            "import os\nif rank == 1: os.kill(os.getpid(), 9)", timeout_s=60
        )
    assert cluster.ranks[1].pid != before.pid
    assert cluster.ranks[1].device_uuid == before.device_uuid
    cluster.execute("nbdist.all_reduce(torch.ones(8, device=device))", timeout_s=60)
