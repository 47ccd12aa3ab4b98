"""A model under DDP on GPUs trains on after failures, over NCCL and on a shared GPU.

The tests are those of tests/process_group, whose model is here on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nbdist import CellError, Cluster
from tests.gpu_marks import needs_gpus
from tests.process_group.test_ddp_after_failures import (  # noqa: F401
    DEADLINE_S,
    RANKS,
    SETUP,
    check_weights,
    test_a_model_trains_on_after_a_death_between_two_cells,
    test_a_model_trains_on_in_a_world_of_another_size,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    needs_gpus(1),
]


@pytest.fixture(
    params=["one GPU", pytest.param("a GPU each", marks=pytest.mark.gpus(4))]
)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, place: str) -> Iterator[Cluster]:
    has_own = place == "a GPU each"
    if has_own and torch.cuda.device_count() <= RANKS:  # one more, for a larger world
        pytest.skip(f"needs {RANKS + 1} GPUs")
    with Cluster(
        RANKS,
        device="cuda",
        ranks_per_gpu=None if has_own else RANKS + 1,
        threads=1,
        on_failure=getattr(request, "param", "replace"),
    ) as running:
        running.execute(SETUP)
        running.execute(
            "for number in range(4): step(number)\ntorch.cuda.synchronize()",
            timeout_s=DEADLINE_S,
        )
        yield running


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("fault", ["raise ValueError", "os.kill(os.getpid(), 9)"])
def test_a_model_can_be_used_after_a_fault_within_a_step(
    cluster: Cluster, rank: int, fault: str
) -> None:
    """NCCL's all-reduce of that step has no result, so the state is restored."""
    cluster.execute(
        "import copy\nkept = copy.deepcopy((net.state_dict(), optimizer.state_dict()))"
    )
    with pytest.raises(CellError):
        cluster.execute(
            "import os\n"
            "def fail(gradient):\n"
            f"    {fault}\n"
            f"if rank == {rank}:\n"
            "    hook = net[0].weight.register_hook(fail)\n"
            "step(4)\n"
            "torch.cuda.synchronize()",
            timeout_s=DEADLINE_S,
        )
    cluster.execute(
        "if 'hook' in globals(): hook.remove()\n"
        "net.load_state_dict(kept[0])\n"
        "optimizer.load_state_dict(kept[1])\n"
        "step(4)",
        timeout_s=DEADLINE_S,
    )
    check_weights(cluster, 5)
