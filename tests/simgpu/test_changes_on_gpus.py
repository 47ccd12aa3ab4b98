"""Which GPU a rank gets when the world grows, and where a saved state is loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from nbdist import CellError, Cluster
from tests.gpu_marks import needs_gpus

SUM = """
x = torch.full((3,), rank + 1.0, device=device)
dist.all_reduce(x)
total = x.tolist()
"""
DIE = "import os, signal\nif rank == 0: os.kill(os.getpid(), signal.SIGKILL)"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    needs_gpus(1),
]
needs_two = needs_gpus(2)


def sum_of_ranks(cluster: Cluster) -> None:
    cluster.execute(SUM, timeout_s=60)
    n = len(cluster.ranks)
    assert cluster["total"] == [[n * (n + 1) / 2] * 3] * n


@needs_two
@pytest.mark.parametrize("per_gpu", [1, 2])
def test_a_rank_that_joins_after_a_loss_gets_the_free_place(per_gpu: int) -> None:
    n = 2 * per_gpu
    with Cluster(
        n, device="cuda", ranks_per_gpu=per_gpu, threads=1, on_failure="shrink"
    ) as cluster:
        sum_of_ranks(cluster)
        with pytest.raises(CellError, match="has died with SIGKILL"):
            cluster.execute(DIE, timeout_s=60)
        cluster.scale(n)
        load = Counter(info.device_uuid for info in cluster.ranks)
        assert sorted(load.values()) == [per_gpu, per_gpu]
        sum_of_ranks(cluster)


def test_a_rank_that_may_share_its_gpu_is_joined_by_another() -> None:
    with Cluster(1, device="cuda", ranks_per_gpu=2, threads=1) as cluster:
        sum_of_ranks(cluster)
        cluster.scale(2)
        assert len({info.device_uuid for info in cluster.ranks}) == 1
        sum_of_ranks(cluster)
        assert len(set(cluster["dist.get_backend_config()"])) == 1


@needs_two
def test_each_rank_loads_a_saved_state_to_its_own_gpu(tmp_path: Path) -> None:
    with Cluster(2, device="cuda", threads=1) as cluster:
        cluster.push(path=str(tmp_path / "state"))
        cluster.execute(
            """
            model = torch.nn.Linear(500, 500).to(device)
            plain = torch.full((1000,), 7.0, device=device)
            state = nbdist.elastic.State(model=model, plain=plain, epoch=3)
            state.save(path)
            held = [torch.cuda.memory_allocated(gpu) for gpu in range(2)]
            state.load(path)
            nbdist.save(plain, path + ".pt")
            loaded = nbdist.load(path + ".pt")
            """
        )
        assert cluster["loaded.device == device"] == [True, True]
        assert cluster["state.plain.device == device"] == [True, True]
        assert cluster["state.plain.unique().tolist()"] == [[7.0], [7.0]]
        assert cluster["next(model.parameters()).device == device"] == [True, True]
        foreign = "torch.cuda.memory_allocated(1 - rank) - held[1 - rank]"
        assert cluster[foreign] == [0, 0]


@needs_two
def test_a_state_saved_on_another_gpu_is_loaded_where_one_is_visible(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "state")
    with Cluster(1, device="cuda", threads=1) as cluster:
        cluster.push(path=path)
        cluster.execute(
            "state = nbdist.elastic.State(plain=torch.ones(3, device='cuda:1'))\n"
            "state.save(path)"
        )
    with Cluster(1, device="cuda", ranks_per_gpu=2, threads=1) as cluster:
        cluster.push(path=path)
        cluster.execute(
            "state = nbdist.elastic.State(plain=torch.zeros(3, device=device))\n"
            "state.load(path)"
        )
        assert cluster["str(state.plain.device)"] == ["cuda:0"]
        assert cluster["state.plain.tolist()"] == [[1.0] * 3]
