"""Horovod, elastic training and the monitor's rows with simulated GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ranks import launch, once

from nbdist import CellInterrupted, Cluster
from tests.gpu_marks import GPUS, needs_gpus, simulated
from tests.processes import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "clusters"))

import elastic_training as elastic

HOROVOD = str(Path(__file__).with_name("horovod_on_gpu.py"))
ELASTIC = f"""{elastic.SETUP}
def break_context():
    torch.zeros(3, device=device)[torch.tensor([9], device=device)] = 1
    torch.cuda.synchronize()
"""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    needs_gpus(1),
]


@once
def horovod_outcomes(own_gpus: bool) -> list[dict[str, str | None]]:
    """Run all cases in one launch; the results of each rank."""
    environment = {"NBDIST_COLLECTIVE_TIMEOUT": "20"}
    if not own_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = "0"  # init() selects cuda:local_rank
    return launch(
        2, HOROVOD, "run_all_cases", own_gpus, deadline_s=250, environment=environment
    )


@pytest.mark.streams
@pytest.mark.parametrize(
    "own_gpus",
    [False, pytest.param(True, marks=pytest.mark.gpus(2))],
    ids=["one GPU", "a GPU each"],
)
def test_horovods_functions(own_gpus: bool) -> None:
    if own_gpus and GPUS < 2:
        pytest.skip("needs two GPUs")
    failed = [
        f"rank {rank}, {case}: {error}"
        for rank, outcomes in enumerate(horovod_outcomes(own_gpus))
        for case, error in outcomes.items()
        if error is not None
    ]
    assert not failed, "\n".join(failed)


@pytest.mark.streams
@pytest.mark.parametrize("event", ["die", "break_context"])
def test_an_elastic_training_goes_on(event: str, tmp_path: Path) -> None:
    with Cluster(2, device="cuda", ranks_per_gpu=2, threads=1) as cluster:
        cluster.execute(ELASTIC)
        (tmp_path / "undisturbed").mkdir()
        cluster.push(folder=str(tmp_path / "undisturbed"))
        cluster.execute(elastic.TRAIN, timeout_s=100)
        reference = elastic.weights(cluster)[0]
        before = [info.pid for info in cluster.ranks]
        cluster.execute(ELASTIC)
        cluster.push(folder=str(tmp_path))
        cluster.execute(f"if rank == 1: events = [(7, 'forward', {event})]")
        cluster.execute(elastic.TRAIN, timeout_s=100)
        after = [info.pid for info in cluster.ranks]
        assert [rank for rank in range(2) if after[rank] != before[rank]] == [1]
        for weight in elastic.weights(cluster):
            assert (weight - reference).abs().max() < 1e-6


@pytest.mark.gpus(1, 2)
@simulated
def test_the_monitor_shows_the_memory_of_each_gpu() -> None:
    n = min(GPUS, 2)
    with Cluster(2, device="cuda", ranks_per_gpu=2 // n) as cluster:
        cluster.execute("held = torch.zeros(2**28, dtype=torch.uint8, device=device)")

        def shown() -> bool:
            devices = cluster.collector.snapshot().devices
            return len(devices) == 2 and all(
                (samples[-1].reserved or 0) >= 2**28
                and (samples[-1].memory_used or 0) > 2**28
                and samples[-1].memory_total == 16 * 2**30
                and samples[-1].temperature is not None
                and samples[-1].power is not None
                for samples in devices.values()
            )

        wait_until(shown)


@pytest.mark.gpus(1, 2)
def test_the_monitor_times_collectives_on_gpus() -> None:
    n = min(GPUS, 2)
    with Cluster(2, device="cuda", ranks_per_gpu=2 // n) as cluster:
        future = cluster.execute(
            "x = torch.ones(2**18, device=device)\nwhile True: nbdist.all_reduce(x)",
            wait=False,
        )

        def timed() -> bool:
            devices = cluster.collector.snapshot().devices
            return len(devices) == 2 and all(
                (samples[-1].bus_bandwidth or 0) > 0 for samples in devices.values()
            )

        try:
            wait_until(timed)
        finally:
            future.interrupt()
            with pytest.raises(CellInterrupted):
                future.result(30)


@pytest.mark.gpus(4)
@needs_gpus(3)
def test_two_ranks_exchange_messages_without_the_third() -> None:
    """NCCL connects two ranks for their first message, and all for a collective."""
    with Cluster(3, device="cuda") as cluster:
        cluster.execute(
            "x = torch.full((2,), rank + 1.0, device=device)\n"
            "if rank == 0: dist.send(x, 1)\n"
            "if rank == 1: dist.recv(x, 0)\n",
            timeout_s=60,
        )
        assert [x.tolist() for x in cluster["x.cpu()"]] == [
            [1.0] * 2,
            [1.0] * 2,
            [3.0] * 2,
        ]
        cluster.execute("dist.all_reduce(x)", timeout_s=60)
        assert [x.tolist() for x in cluster["x.cpu()"]] == [[5.0] * 2] * 3


RECONFIGURE = """
from types import SimpleNamespace
group = dist.group.WORLD
x = torch.ones(3, device=device)
dist.all_reduce(x)
assert x.eq(3).all() and dist.get_backend_config() == "cpu:nbdist,cuda:nccl"
handles = [None] * world_size
dist.all_gather_object(handles, group.get_reconfigure_handle())
if rank != 1:
    for uuid in (1, 2):
        members = [handles[2], handles[0]]
        group.reconfigure(SimpleNamespace(uuid=uuid, handles=members))
        y = torch.full((3,), rank + 1, device=device)
        dist.all_reduce(y)
        assert y.eq(4).all(), y
        z = torch.full((2,), float(rank), device=device)
        dist.broadcast(z, group_src=0)
        assert z.eq(2).all(), z
"""


@pytest.mark.gpus(4)
@needs_gpus(3)
def test_a_group_changes_its_members_with_nccl() -> None:
    with Cluster(3, device="cuda", threads=1) as cluster:
        cluster.execute(RECONFIGURE, timeout_s=60)
        cluster.execute(RECONFIGURE, timeout_s=60)  # all ranks are members again


HALVES = """
import time
from types import SimpleNamespace
group = dist.group.WORLD
handles = [None] * world_size
dist.all_gather_object(handles, group.get_reconfigure_handle())
half = rank // 2
group.reconfigure(SimpleNamespace(uuid=1, handles=handles[2 * half : 2 * half + 2]))
x = torch.full((3,), rank + 1.0, device=device)
if half == 0:
    dist.all_reduce(x)
    if rank == 0:
        time.sleep(6)
    dist.all_reduce(x)
    x.tolist()
"""


@pytest.mark.gpus(4)
@needs_gpus(4)
def test_a_rank_of_one_half_does_not_wait_for_the_idle_other_half() -> None:
    """Both halves are reconfigured with the same number."""
    with Cluster(4, device="cuda", threads=1) as cluster:
        cluster.execute(HALVES, timeout_s=60)
        assert cluster["x.tolist()"] == [[6.0] * 3] * 2 + [[3.0] * 3, [4.0] * 3]
