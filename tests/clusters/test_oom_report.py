"""The report of a rank that runs out of GPU memory, with simulated numbers."""

from __future__ import annotations

import pytest

from nbdist import Cluster
from nbdist.clusters.oom_report import describe_card, explained
from nbdist.errors import CellError
from nbdist.wire import Failure, RankInfo
from tests.rank_info import rank_info

GIB = 2**30


def gpu_rank(rank: int, card: str | None, limit: int | None = None) -> RankInfo:
    name = "NVIDIA H200"
    card_fields = {"device": "cuda:0", "device_name": name, "device_uuid": card}
    return rank_info(rank, 3, memory_limit=limit, **card_fields)


def sizes(reserved: int, allocated: int, process: int | None = None) -> dict:
    return {
        "resident": GIB,
        "reserved": reserved * GIB,
        "allocated": allocated * GIB,
        "total": 140 * GIB,
        "used": 139 * GIB,
        "limit": None,
        "process": None if process is None else process * GIB,
    }


INFOS = [
    gpu_rank(0, "GPU-a", 70 * GIB),
    gpu_rank(1, "GPU-a", 70 * GIB),
    gpu_rank(2, "GPU-b"),
]


def test_every_rank_on_the_gpu_is_named():
    answers = {0: sizes(60, 58, 61), 1: sizes(62, 10), 2: sizes(1, 1)}
    text = describe_card(INFOS[:2], answers, 0)
    assert text.splitlines() == [
        "Memory of NVIDIA H200, shared by 2 ranks: 140.00 GiB, of which 1.00 GiB are "
        "free",
        "  rank 0: 60.00 GiB held by torch, 58.00 GiB of it in tensors, 61.00 GiB in "
        "all, at most 70.00 GiB",
        "  rank 1: 62.00 GiB held by torch, 10.00 GiB of it in tensors, at most "
        "70.00 GiB",
        "  16.00 GiB: other processes, and CUDA itself",
        "What helps: a smaller batch, fewer --ranks-per-gpu, or another --gpu-memory",
    ]


def test_the_report_names_a_rank_that_does_not_answer():
    text = describe_card(INFOS[2:], {2: None}, 2)
    assert text.splitlines()[:2] == [
        "Memory of NVIDIA H200",
        "  rank 2: does not answer",
    ]
    assert "growth=True" in text


def test_only_out_of_memory_failures_are_explained():
    lines = ("Traceback",)
    short = Failure(1, "box", "OutOfMemoryError", "CUDA out of memory.", "", lines)
    other = Failure(2, "box", "ValueError", "no", "", lines)
    reports = explained([short, other], INFOS, lambda: {1: sizes(62, 10)})
    assert reports[1] is other
    assert reports[0].evalue.startswith("CUDA out of memory.\nMemory of NVIDIA H200")
    assert "rank 0: does not answer" in reports[0].traceback[-1]

    def never():
        raise AssertionError("the ranks are asked without need")

    assert explained([other], INFOS, never) == [other]


@pytest.mark.gpu
def test_two_ranks_that_share_a_real_gpu_are_named():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    with Cluster(2, ranks_per_gpu=2, gpu_memory="2GiB") as cluster:
        cluster.execute("x = torch.zeros(2**28, device=device)")  # 1 GiB each
        with pytest.raises(CellError) as raised:
            cluster.execute("y = torch.zeros(2**29, device=device)", [1])
        shown = "\n".join(raised.value.rendered)
        assert "shared by 2 ranks" in shown
        for rank in range(2):
            assert f"rank {rank}: 1.00 GiB held by torch" in shown
        assert shown.count("at most 2.00 GiB") == 2
        assert cluster.run(_limit_in_gib, "4GiB") == [4.0, 4.0]


def _limit_in_gib(limit: str) -> float:
    import nbdist

    return round(nbdist.memory(limit, growth=True).limit / GIB, 3)
