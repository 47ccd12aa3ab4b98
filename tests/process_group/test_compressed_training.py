"""A training whose gradients are compressed between hosts ends as one without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import launch, once

FILE = str(Path(__file__).with_name("compressed_training.py"))
LEADERS = (0, 2)
BYTES = {"bf16": 0.5, "int8": 0.27}
"""The most bytes between hosts, as a share of float32's."""


@once
def trained() -> list[dict[str, Any]]:
    return launch(4, FILE, "run", ["", *BYTES], deadline_s=150)


@pytest.mark.parametrize("compression", BYTES)
def test_the_loss_is_that_without_compression(compression: str) -> None:
    for ends in trained():
        exact = ends[""]["loss"]
        assert exact < 0.2
        assert ends[compression]["loss"] == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("compression", ["", *BYTES])
def test_all_ranks_end_with_the_same_bits(compression: str) -> None:
    assert len({ends[compression]["weights"] for ends in trained()}) == 1


@pytest.mark.parametrize("compression", BYTES)
def test_fewer_bytes_are_sent_between_hosts(compression: str) -> None:
    for rank, ends in enumerate(trained()):
        found = ends[compression]
        if rank in LEADERS:
            share = found["sent"] / found["in_float32"]
            assert 0.9 * BYTES[compression] < share <= BYTES[compression]
        else:
            assert found["sent"] == 0
