"""Process groups of the user's over NCCL: after an abort, and destroyed by one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdist import CellError, Cluster
from tests.gpu_marks import needs_gpus

N = 2
GROUPS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
group = dist.new_group([0, 1])
gloo = dist.new_group([0, 1], backend="gloo")
pure = dist.new_group([0, 1], backend="nccl")
mesh = init_device_mesh("cuda", (world_size,))
line = torch.nn.Linear(3, 3).to(device)
model = DistributedDataParallel(line, process_group=group)
model(torch.ones(1, 3, device=device)).sum().backward()
x = torch.ones(3, device=device)
for each in (None, group, pure, mesh.get_group()):
    dist.all_reduce(x, group=each)
dist.all_reduce(torch.ones(3), group=gloo)
torch.cuda.synchronize()
"""
AFTER = """
for each in (None, group, mesh.get_group()):
    y = torch.full((3,), rank + 1.0, device=device)
    dist.all_reduce(y, group=each)
    assert y.tolist() == [3.0] * 3
for each in (group, gloo):
    y = torch.full((3,), rank + 1.0)
    dist.all_reduce(y, group=each)
    assert y.tolist() == [3.0] * 3
line.weight.grad = None
model(torch.full((1, 3), rank + 1.0, device=device)).sum().backward()
assert line.weight.grad.tolist() == [[1.5] * 3] * 3
"""
GROUP = """
group = dist.new_group([0, 1])
x = torch.ones(3, device=device)
dist.all_reduce(x, group=group)
torch.cuda.synchronize()
"""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(2),
    pytest.mark.timeout(200),
    needs_gpus(N),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(N, device="cuda", threads=1) as running:
        yield running


@pytest.mark.parametrize("name", ["None", "group", "pure"])
def test_groups_stay_valid_after_an_abort_of_nccl(cluster: Cluster, name: str) -> None:
    """Those with torch's own backend "nccl" end with an error that says what to do."""
    cluster.execute(GROUPS, timeout_s=60)
    pids = [info.pid for info in cluster.ranks]
    for _ in range(2):
        with pytest.raises(CellError, match=r"released from .* by NCCL"):
            cluster.execute(
                f"if rank == 0: dist.all_reduce(x, group={name}); x.tolist()",
                timeout_s=60,
            )
        cluster.execute(AFTER, timeout_s=60)
        name = "group"
    with pytest.raises(CellError) as ended:
        cluster.execute("dist.all_reduce(x, group=pure)", timeout_s=60)
    for failure in ended.value.result.failures:
        assert "make it again with dist.new_group" in failure.evalue
    cluster.execute(AFTER, timeout_s=60)
    assert [info.pid for info in cluster.ranks] == pids


def test_a_group_is_destroyed_with_its_part_of_nccl(cluster: Cluster) -> None:
    cluster.execute(
        "group = dist.new_group([0, 1])\n"
        "x = torch.ones(3, device=device)\n"
        "dist.all_reduce(x, group=group)\n"
        "dist.destroy_process_group(group)",
        timeout_s=60,
    )
    assert cluster["'_nccl' in vars(group)"] == [False] * N


def test_a_rank_that_destroys_a_group_alone_is_not_kept(cluster: Cluster) -> None:
    cluster.execute(GROUP, timeout_s=60)
    cluster.execute("if rank == 0: dist.destroy_process_group(group)", timeout_s=60)
    cluster.execute("dist.all_reduce(x); x.tolist()", timeout_s=60)
    cluster.execute("if rank == 1: dist.destroy_process_group(group)", timeout_s=60)


def test_a_rank_that_destroys_a_group_alone_can_be_interrupted(
    cluster: Cluster,
) -> None:
    cluster.execute(GROUP, timeout_s=60)
    with pytest.raises(CellError, match="not finished after 2 s"):
        cluster.execute("if rank == 0: dist.destroy_process_group(group)", timeout_s=2)
    cluster.execute("dist.all_reduce(x); x.tolist()", timeout_s=60)
