"""How far the leaves of ranks differ, with simulated ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nbdist.training import replicas
from nbdist.training.leaves import Leaf
from nbdist.training.replicas import _distance, _measured
from nbdist.wire import LeafComparison

RESULT = LeafComparison("x", "float32 3 cpu", ((0,), (1,), (2,)))
FIRST = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([[1, 2, 4], [1, 5, 4]], "2 of 3 elements, first at [1], by at most 3"),
        (
            [[1, 2, math.nan], [1, 2.5, 3]],
            "1 of 3 elements, first at [1], by at most nan",
        ),
        (
            [[1, 2.5, 3], [math.nan, 2, 3]],
            "1 of 3 elements, first at [0], by at most nan",
        ),
        (
            [[1, 2, math.inf], [1, 2, 3]],
            "1 of 3 elements, first at [2], by at most inf",
        ),
    ],
)
def test_the_largest_difference_of_all_ranks_is_shown(
    others: list[list[float]], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, there = FIRST.clone(), map(torch.FloatTensor, others)
    gathered = [_distance(each, FIRST) for each in (mine, *there)]
    monkeypatch.setattr(replicas, "broadcast", lambda *_, **__: None)
    monkeypatch.setattr(replicas, "all_gather_object", lambda *_, **__: gathered)
    group: Any = None
    found = _measured(RESULT, Leaf("x", "float32 3 cpu", mine), group)
    assert found.difference == text


def test_a_difference_names_its_ranks() -> None:
    assert str(RESULT) == "x differs on rank 1 and 2 from rank 0"
