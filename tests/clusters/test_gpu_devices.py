"""Ranks that each have a GPU of their own, on a machine with two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nbdist import Cluster
from nbdist.errors import CellTimeout
from nbdist.ipc import endpoints
from tests.gpu_marks import needs_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(2),
    needs_gpus(2),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, device="cuda") as running:
        yield running


def test_each_thread_of_a_rank_uses_its_own_gpu(cluster: Cluster) -> None:
    assert cluster["torch.cuda.current_device()"] == [0, 1]
    cluster.execute(
        "class Look:\n"
        "    def __repr__(self): return f'GPU {torch.cuda.current_device()}'\n"
        "look = Look()\n"
    )
    registry = cluster._live()
    answers = registry.ask(endpoints.DESCRIBE, "look", 0)  # by the control thread
    for rank in range(2):
        assert f"GPU {rank}" in answers[rank]["text/plain"]


def test_a_script_selects_the_gpu_of_its_local_rank(cluster: Cluster) -> None:
    cluster.execute(
        "import os\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "x = torch.full((3,), rank + 1.0, device=f'cuda:{local_rank}')\n"
        "nbdist.all_reduce(x)"
    )
    assert cluster["str(device)"] == ["cuda:0", "cuda:1"]
    assert cluster["str(x.device)"] == ["cuda:0", "cuda:1"]
    assert cluster["torch.cuda.device_count()"] == [torch.cuda.device_count()] * 2
    assert [x.tolist() for x in cluster["x.cpu()"]] == [[3.0] * 3] * 2


def test_pushed_tensors_are_on_the_rank_s_own_gpu(cluster: Cluster) -> None:
    cluster.push(pushed=torch.ones(2, device="cuda"))
    assert cluster["pushed.get_device()"] == [0, 1]


def test_variables_are_inspected_on_the_rank_s_own_gpu(cluster: Cluster) -> None:
    cluster.execute(
        "class Look:\n"
        "    def __repr__(self): return str(torch.cuda.current_device())\n"
        "look = Look()\n"
    )
    assert cluster.inspect("look") == {0: "0", 1: "1"}
    found = [variable.value for (variable,) in cluster.variables("look").values()]
    assert found == ["0", "1"]


def test_a_joined_rank_of_horovod_takes_part_on_its_own_gpu(cluster: Cluster) -> None:
    cluster.execute(
        "import nbdist.horovod as hvd\n"
        "hvd.init()\n"
        "x = torch.ones(2, device=device)\n"
        "handle = hvd.allreduce_async(x, op=hvd.Sum)  # on a thread of its own\n"
        "if rank == 0:\n"
        "    hvd.synchronize(handle)\n"
        "    y = hvd.allreduce(x, op=hvd.Sum)\n"
        "hvd.join()\n",
        timeout_s=100,
    )
    assert cluster.pull("y.tolist()", [0]) == [[1.0, 1.0]]


def test_the_gpu_of_a_call_is_not_that_of_an_earlier_call(cluster: Cluster) -> None:
    """The thread of asynchronous calls began while another GPU was current."""
    cluster.execute(
        "import nbdist.horovod as hvd\n"
        "hvd.init()\n"
        "hvd.shutdown()\n"
        "hvd.init()\n"
        "x = torch.full((2,), rank + 1.0, device=device)\n"
        "with torch.cuda.device(1 - local_rank):\n"
        "    hvd.synchronize(hvd.allreduce_async(torch.ones(1)))\n"
        "    y = hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum))\n"
        "handle = hvd.allreduce_async(torch.ones(1), name='before the join')\n"
        "if rank == 0:\n"
        "    z = hvd.allreduce(x, op=hvd.Sum)\n"
        "hvd.join()\n"
        "hvd.synchronize(handle)\n",
        timeout_s=100,
    )
    assert cluster["(y.tolist(), y.get_device())"] == [([3.0] * 2, 0), ([3.0] * 2, 1)]
    assert cluster.pull("z.tolist()", [0]) == [[1.0, 1.0]]


def test_a_release_creates_no_nccl_communicator(cluster: Cluster) -> None:
    """With one, the renewal would destroy the user's process groups."""
    cluster.execute("import torch.distributed as dist; own = dist.new_group()")
    with pytest.raises(CellTimeout):
        cluster.execute(
            "import time\n"
            "try:\n"
            "    time.sleep(60)\n"
            "except KeyboardInterrupt:\n"
            "    time.sleep(3)  # longer than an interrupt is waited for\n",
            timeout_s=1,
        )
    cluster.execute("one = torch.ones(1); dist.all_reduce(one, group=own)")
    assert [one.item() for one in cluster["one"]] == [2.0, 2.0]


@pytest.mark.parametrize("root", [0, 1])
def test_ranks_gather_and_scatter_over_nccl(cluster: Cluster, root: int) -> None:
    """It follows the tests of ranks that have not used NCCL."""
    cluster.execute(
        "import torch.distributed as dist\n"
        "x = torch.full((2,), rank + 1.0, device=device)\n"
        "parts = [torch.empty_like(x) for _ in range(2)]\n"
        f"is_root = rank == {root}\n"
        f"dist.gather(x, parts if is_root else None, dst={root})\n"
        "y = torch.empty_like(x)\n"
        f"dist.scatter(y, parts if is_root else None, src={root})\n"
        "gathered = [part.tolist() for part in parts]",
        timeout_s=60,
    )
    assert cluster["gathered"][root] == [[1.0] * 2, [2.0] * 2]
    assert cluster["y.tolist()"] == [[1.0] * 2, [2.0] * 2]


def test_a_rank_that_joins_has_its_own_gpu_as_the_default_device() -> None:
    with Cluster(2, device="cuda", on_failure="replace") as cluster:
        cluster.execute("torch.set_default_device(device)")
        cluster.replace([1])
        assert cluster["str(torch.ones(1).device)"] == ["cuda:0", "cuda:1"]
