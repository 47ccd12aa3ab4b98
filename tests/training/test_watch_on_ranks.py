"""`nbdist.watch` on the ranks of a cluster."""

from __future__ import annotations

import re

import pytest

from nbdist import CellError, Cluster

SPOILED = """
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
model.to(nbdist.device())

def spoil(parameter):
    parameter.register_hook(lambda g: torch.full_like(g, float("nan")))

def train(model, steps=6, at=0, spoil=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        if step == at:
            spoil()
        optimizer.zero_grad()
        model(torch.randn(3, 4, device=nbdist.device())).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_the_rank_whose_gradient_was_first_is_named(cluster: Cluster, rank: int):
    cluster.execute(SPOILED)
    # Equal marks of several ranks within a second are one mark.
    cluster.collector.clear()
    with pytest.raises(CellError) as caught:
        cluster.execute(
            "ddp = DDP(model)\n"
            "nbdist.watch(ddp)\n"
            f"train(ddp, 6, 3, lambda: rank == {rank} and spoil(model[2].weight))",
            timeout_s=60,
        )
    error = str(caught.value)
    # On GPUs, others may notice what they have received in a later step.
    first, *_ = sorted(re.findall(r"NotFinite: step (\d+)", error))
    (named,) = re.findall(rf"(.*) of 4.*NotFinite: step {first}: (.*)", error)
    what = "the gradient of parameter module.2.weight has NaNs"
    assert (first, named) == ("3", (f"rank {rank}", what)), error
    marks = map(str, cluster.collector.marks)
    assert f"rank {rank}: {what}" in list(marks)
    cluster.execute("x = torch.ones(1); nbdist.all_reduce(x); assert x.item() == 4")


def test_a_sharded_and_a_compiled_model(cluster: Cluster):
    cluster.execute(SPOILED)
    with pytest.raises(
        CellError, match=r"step 7: the gradient of parameter 0\.\w+ has NaNs"
    ):
        cluster.execute(
            "from torch.distributed.fsdp import fully_shard\n"
            "from torch.distributed.device_mesh import init_device_mesh\n"
            "mesh = init_device_mesh(str(nbdist.device().type), (world_size,))\n"
            "for layer in (model[0], model[2], model): fully_shard(layer, mesh=mesh)\n"
            "with nbdist.watch(model):\n"
            "    train(model)\n"
            "    spoiled = lambda *a: a[2].register_hook(lambda g: g * float('nan'))\n"
            "    model[0].register_forward_hook(lambda *a: spoiled(*a) and None)\n"
            "    train(model)",
            timeout_s=60,
        )
    with pytest.raises(CellError) as caught:
        cluster.execute(
            SPOILED + "compiled = torch.compile(model, backend='eager')\n"
            "nbdist.watch(compiled)\n"
            "train(compiled, 6, 4, lambda: spoil(model[2].bias))",
            ranks=[1],
            timeout_s=90,
        )
    assert re.search(r"step 4: the gradient of parameter \S*2\.bias", str(caught.value))
