"""Random collectives of CUDA tensors, compared with torch's functions on the CPU.

NBDIST_SEED=1234 repeats one draw, with `pytest -m "gpu and not slow"`.
"""

from __future__ import annotations

from pathlib import Path

import cuda_draws
import pytest
from ranks import RanksFailed, launch

from tests.gpu_marks import needs_gpus, simulated
from tests.seed import CHOSEN, SEED

CALLS = str(Path(__file__).with_name("drawn_calls.py"))
AT_ONCE = 1 if CHOSEN else 50
"""Draws in one launch."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(4),
    pytest.mark.timeout(400),
    simulated,
    needs_gpus(cuda_draws.GPUS),
]


def draws_hold(part: int) -> None:
    first = SEED + part * AT_ONCE
    seeds = list(range(first, first + AT_ONCE))
    again = "SIMGPU_COUNT=4 NBDIST_SEED=%s ... pytest " + Path(__file__).name
    deadline_s = 60.0 + 2 * AT_ONCE
    try:
        outcomes = launch(cuda_draws.RANKS, CALLS, "run", seeds, deadline_s=deadline_s)
    except RanksFailed as hung:
        pytest.fail(f"{again % 'the seed of the last draw below'}\n{hung}")
    failed = [each for each in outcomes if each is not None]
    assert not failed, "\n".join(
        [again % failed[0][0], str(cuda_draws.draw(failed[0][0]))]
        + [f"rank {rank}: {error}" for rank, (_, error) in enumerate(failed) if error]
    )


@pytest.mark.streams
@pytest.mark.parametrize("part", range(1 if CHOSEN else 6))
def test_300_draws(part: int) -> None:
    draws_hold(part)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6, 60))
def test_3000_draws(part: int) -> None:
    draws_hold(part)
