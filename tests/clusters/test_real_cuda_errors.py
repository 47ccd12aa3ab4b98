"""Errors of a real GPU: a failed context, work that an interrupt cannot end, memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nbdist import Cluster
from nbdist.errors import CellError, CellTimeout, UsageError
from tests.gpu_marks import NEEDS_A_REAL_GPU

SUM = """
x = torch.full((100_000,), rank + 1.0, device=device)
nbdist.all_reduce(x)
assert (x == world_size * (world_size + 1) / 2).all()
"""
# What a wrong index into an embedding ends in.
ASSERT = """
table = torch.nn.Embedding(10, 4, device=device)
table(torch.tensor([10], device=device)).sum().item()
"""

pytestmark = [*NEEDS_A_REAL_GPU, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, ranks_per_gpu=3, on_failure="replace") as running:
        yield running


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_device_side_assert_costs_one_process(cluster: Cluster, rank: int) -> None:
    cluster.execute("kept = rank + 40\n" + SUM)
    with pytest.raises(CellError) as raised:
        cluster.execute(ASSERT, [rank])
    shown = "\n".join(raised.value.rendered)
    assert f"CUDA context of rank {rank} on NVIDIA" in shown
    assert f"%dist_restart -r {rank}" in shown
    assert cluster["kept"] == [40, 41, 42]  # also the failed rank's
    with pytest.raises(CellError, match="device-side assert"):
        cluster.execute("torch.ones(1, device=device).item()", [rank])
    cluster.replace([rank])
    cluster.execute(SUM, timeout_s=60)
    others = [each for each in range(3) if each != rank]
    assert cluster.pull("kept", others) == [each + 40 for each in others]


def test_an_assert_while_others_wait_in_an_all_reduce(cluster: Cluster) -> None:
    with pytest.raises(CellError) as raised:
        cluster.execute(f"if rank == 1:\n  exec({ASSERT!r})\n{SUM}", timeout_s=60)
    assert "CUDA context of rank 1" in "\n".join(raised.value.rendered)
    cluster.replace([1])
    cluster.execute(SUM, timeout_s=60)


def test_a_cell_that_waits_for_a_busy_gpu_ends(cluster: Cluster) -> None:
    """The host waits in CUDA for a kernel of 20 seconds: no interrupt ends that."""
    cluster.execute("kept = rank")
    with pytest.raises(CellTimeout):
        cluster.execute(
            "if rank == 2:\n"
            "    torch.cuda._sleep(40_000_000_000)\n"
            "    torch.cuda.synchronize()\n" + SUM,
            timeout_s=2,
        )
    with pytest.raises(UsageError, match="%dist_restart -r 2 replaces it"):
        cluster.execute(SUM)
    cluster.replace([2])
    cluster.execute(SUM, timeout_s=60)
    assert cluster.pull("kept", [0, 1]) == [0, 1]


def test_a_rank_that_allocates_too_much_trains_on(cluster: Cluster) -> None:
    with pytest.raises(CellError, match="out of memory"):
        cluster.execute("big = torch.empty(2**40, device=device)", [1])
    cluster.execute(SUM, timeout_s=60)
    cluster.execute(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "torch.manual_seed(0)\n"
        "model = DistributedDataParallel(torch.nn.Sequential(\n"
        "    torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(),\n"
        "    torch.nn.Linear(8 * 36, 10)).to(device))\n"
        "scaler = torch.amp.GradScaler('cuda')\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for step in range(5):\n"
        "    images = torch.randn(16, 1, 8, 8, device=device) + rank\n"
        "    with torch.autocast('cuda', torch.float16):\n"
        "        loss = model(images).square().mean()\n"
        "    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
        "    optimizer.zero_grad()\n"
        "weights = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()",
        timeout_s=120,
    )
    first, *others = cluster["weights"]
    assert all(torch.equal(first, other) for other in others)
