"""Loaders, files and random numbers on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nbdist.training.data.loader import loader
from tests.collectives.ranks import launch
from tests.training.rank_functions import samples

FUNCTIONS = str(Path(__file__).parent / "rank_functions.py")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each of three ranks."""
    return launch(3, FUNCTIONS, "everything", str(tmp_path_factory.mktemp("world")))


def trained_alone() -> list[np.ndarray]:
    """Train in one process on the same global batches; the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader(samples(), global_batch_size=12, seed=2):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def test_training_on_uneven_parts_equals_one_process(world):
    expected = trained_alone()
    for rank in (seen["uneven"] for seen in world):
        last = (1, 3.0) if rank["rank"] == 0 else (0, 0.0)
        assert rank["weights"] == [(4, 1.0), last]
        for own, single in zip(rank["parameters"], expected, strict=True):
            np.testing.assert_allclose(own, single, rtol=1e-12)


def test_torchs_join_works_with_ranks_that_end_early(world):
    ranks = [seen["joined"] for seen in world]
    assert [rank["steps"] for rank in ranks] == [2, 1, 1]
    for rank in ranks[1:]:
        for own, first in zip(rank["parameters"], ranks[0]["parameters"], strict=True):
            np.testing.assert_array_equal(own, first)


def test_ranks_make_equal_models_and_then_draw_different_numbers(world):
    ranks = [seen["seeded"] for seen in world]
    assert len({tuple(weights) for weights, _drawn in ranks}) == 1
    assert len({tuple(drawn) for _weights, drawn in ranks}) == 3


def test_a_state_that_was_saved_can_be_loaded_at_once_on_every_rank(world):
    for seen in (rank["states"] for rank in world):
        assert seen["loaded"] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert "missing/state was not saved: FileNotFoundError" in seen["reason"]


def test_rank_0_writes_and_a_failure_raises_on_all_ranks(world):
    for seen in (rank["saved"] for rank in world):
        assert seen["there"]
        assert seen["loaded"]["rank"] == 0
        assert torch.equal(seen["loaded"]["weight"], torch.zeros(3))
        first, second = seen["reasons"]
        assert "missing/model.pt was not saved: FileNotFoundError" in first
        assert "model.pt was not saved" in second
        assert "<lambda>" in second
        assert seen["left"] == ["model.pt"]
