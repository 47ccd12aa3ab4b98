"""A rank is killed while its work is queued on a GPU that other ranks share."""

from __future__ import annotations

import pytest

from nbdist import Cluster
from nbdist.errors import CellError

RUN_AHEAD = """
import os, signal
tensor = torch.ones(30_000_000, device=device)
nbdist.all_reduce(tensor)
torch.cuda._sleep(2_000_000_000)  # about a second, during which the hosts continue
handles = [nbdist.all_reduce(tensor, async_op=True) for _ in range(3)]
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for handle in handles:
    handle.wait()
"""
SUM = """
torch.cuda.synchronize()
tensor = torch.full((1000,), rank + 1.0, device=device)
nbdist.all_reduce(tensor)
assert (tensor == world_size * (world_size + 1) / 2).all()
"""


MIB = 2**20


@pytest.mark.gpu
@pytest.mark.timeout(180)
@pytest.mark.parametrize("on_failure", ["shrink", "replace"])
def test_no_device_waits_for_a_dead_rank(on_failure: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    with Cluster(3, ranks_per_gpu=3, on_failure=on_failure) as cluster:
        cluster.execute(SUM)
        with pytest.raises(CellError):
            cluster.execute(RUN_AHEAD, timeout_s=60)
        cluster.execute(SUM, timeout_s=60)


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_memory_that_a_dead_rank_has_read_is_freed() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    held = "torch.cuda.ipc_collect(); held = torch.cuda.memory_allocated()"
    with Cluster(2, ranks_per_gpu=2, on_failure="replace") as cluster:
        cluster.execute(SUM + held)
        before = cluster.pull("held", [0])[0]
        for _ in range(2):
            with pytest.raises(CellError):
                cluster.execute("import os\nif rank == 1: os.kill(os.getpid(), 9)")
            cluster.execute(SUM + held, timeout_s=60)
        assert cluster.pull("held", [0])[0] < before + 20 * MIB
