"""The fault matrix with CUDA tensors: ranks that share a GPU, and ranks with one each.

The faults, places and checks are those of `tests/reliability`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from nbdist import Cluster, NbdistError
from tests.gpu_marks import GPUS, needs_gpus
from tests.reliability import test_fault_matrix as matrix
from tests.reliability.matrix import CASES, Case

PLACES = ("in an all-reduce", "in DDP backward")
CHOSEN = [case for case in CASES if case.which == "middle" and case.place in PLACES]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    needs_gpus(1),
]


class GpuRanks(matrix.SharedRanks):
    """Three ranks whose tensors are on GPUs unless they say otherwise."""

    def __init__(self, ranks_per_gpu: int | None) -> None:
        super().__init__()
        self._ranks_per_gpu = ranks_per_gpu

    def ready(self) -> Cluster:
        if self._cluster is None:
            shared = self._ranks_per_gpu
            cluster = Cluster(3, device="cuda", ranks_per_gpu=shared, threads=1)
            self._cluster = cluster.start()
            setup = "torch.set_default_device(device)\n" + matrix.SETUP
            self._cluster.execute(setup, setup=True)
            self._cluster.execute("step('nowhere', 'none', 0)")
        return self._cluster


@pytest.fixture(
    scope="module",
    params=["one GPU", pytest.param("a GPU each", marks=pytest.mark.gpus(4))],
)
def ranks(request: pytest.FixtureRequest) -> Iterator[GpuRanks]:
    has_own = request.param == "a GPU each"
    if has_own and GPUS < 3:
        pytest.skip("needs three GPUs")
    made = GpuRanks(None if has_own else 3)
    yield made
    made.close()


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_a_fault_ends_its_cell_and_names_the_rank(ranks: GpuRanks, case: Case) -> None:
    cluster = ranks.ready()
    try:
        cluster.execute(matrix.KEEP)
        before = [info.pid for info in cluster.ranks]
        interrupter = matrix.Interrupter(
            case.prints, lambda: matrix._has_happened(case, before[case.rank])
        )
        with pytest.raises(NbdistError) as ended:
            matrix._inject(cluster, case, interrupter, before[case.rank])
        said = str(ended.value) + "\n".join(getattr(ended.value, "rendered", ()))
        assert re.search(case.says, said), said
        matrix._repair(cluster, case)
        matrix._assert_usable(cluster, case, before)
    except BaseException:
        ranks.close()
        raise
