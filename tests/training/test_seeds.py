"""Ranks draw equal numbers first, and different numbers after the split."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from nbdist.errors import UsageError
from nbdist.training import seeds
from nbdist.training.seeds import seed_all


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


@pytest.fixture(autouse=True)
def _keep_the_generators() -> Iterator[None]:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, seed: int, extra: int):
    """The numbers that a rank draws before the split and after it."""
    monkeypatch.setattr(seeds, "rank_and_size", lambda _group: (rank, 4))
    with seed_all(seed):
        alike = draw()
        for _ in range(extra):
            draw()
    return alike, draw()


def test_ranks_draw_equal_numbers_first_and_different_numbers_then(monkeypatch):
    drawn = [as_rank(monkeypatch, rank, 7, rank) for rank in range(4)]
    assert len({alike for alike, _own in drawn}) == 1
    for each in zip(*(own for _alike, own in drawn), strict=True):
        assert len(set(each)) == 4
    assert as_rank(monkeypatch, 2, 7, 5) == drawn[2]
    assert as_rank(monkeypatch, 2, 8, 2)[1] != drawn[2][1]


def test_the_equal_numbers_are_those_of_torch():
    seed_all(3)
    first = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(4))


@pytest.mark.parametrize("seed", [-1, 0.5, "x", 2**64])
def test_an_invalid_seed_is_refused(seed):
    with pytest.raises(UsageError, match="expected a whole number, 0 or more"):
        seed_all(seed)
