"""What only a GPU of AMD's can show."""

from __future__ import annotations

import os

import pytest
import torch

from nbdist import Cluster
from nbdist.clusters.hosts.machine import this_host
from nbdist.telemetry.cards import open_card

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu_real,
    pytest.mark.skipif(torch.version.hip is None, reason="needs a ROCm build of torch"),
]


def test_torch_and_amdsmi_see_the_same_gpus() -> None:
    gpus = this_host().gpus
    assert len(gpus) == torch.cuda.device_count()
    held = [
        torch.ones(2**28, dtype=torch.uint8, device=f"cuda:{i}")
        for i in range(len(gpus))
    ]
    for index, gpu in enumerate(gpus):
        assert gpu.memory == pytest.approx(torch.cuda.mem_get_info(index)[1], rel=0.02)
        card = open_card(gpu.uuid)
        assert card is not None
        reading = card.read()
        assert (reading.memory_used or 0) > held[index].nbytes
        assert (reading.memory_total, reading.power is None) == (gpu.memory, False)
        assert (card.process_memory(os.getpid()) or held[index].nbytes) >= held[
            index
        ].nbytes
        card.close()


def test_ranks_reduce_on_the_gpus() -> None:
    n = len(this_host().gpus)
    with Cluster(device="cuda") as cluster:
        cluster.execute(
            "x = torch.full((2**20,), rank + 1.0, device=device)\nnbdist.all_reduce(x)"
        )
        assert cluster.pull("x.mean().item()") == [n * (n + 1) / 2] * n
