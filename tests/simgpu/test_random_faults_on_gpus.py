"""Random faults on ranks that share a GPU, and on ranks with one each.

The draws, moments and expectations are those of `tests/chaos`, and so is the variable
NBDIST_CHAOS_SEED. The tensors of the ranks are on their GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.chaos import test_chaos as chaos
from tests.chaos.draw import RANKS, Draw, draw, spread
from tests.chaos.expectations import expected
from tests.chaos.reused_cluster import ReusedCluster
from tests.chaos.reused_cluster import reused as reused
from tests.gpu_marks import GPUS, needs_gpus

ALL_DIE_IN_A_COMMIT = 46832
SEEDS = [*spread(range(3000, 4000), 6), ALL_DIE_IN_A_COMMIT]
MOST_RANKS = RANKS + 1
"""After a change of size."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    needs_gpus(1),
]


def _draws() -> list[Draw]:
    chosen = os.environ.get("NBDIST_CHAOS_SEED")
    return [draw(int(seed)) for seed in (chosen.split(",") if chosen else SEEDS)]


@pytest.fixture(scope="module", params=["one GPU", "a GPU each"])
def _reused(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ReusedCluster]:
    has_own = request.param == "a GPU each"
    if has_own and GPUS < MOST_RANKS:
        pytest.skip(f"needs {MOST_RANKS} GPUs")
    folder = tmp_path_factory.mktemp("chaos")
    reused = ReusedCluster(folder, ranks_per_gpu=1 if has_own else MOST_RANKS)
    yield reused
    reused.end()


@pytest.mark.parametrize("drawn", _draws(), ids=str)
def test_a_draw(reused: ReusedCluster, drawn: Draw) -> None:
    if drawn.fault == "disk full" and reused.full is None:
        pytest.skip("a full disk needs a file system of its own, which root can mount")
    chaos._run_draw(reused, drawn, expected(drawn))
