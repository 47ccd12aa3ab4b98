"""The ranks divide a tensor in the same way, whatever its strides are."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import launch

CASES_FILE = str(Path(__file__).with_name("strided_tensors.py"))


@pytest.mark.parametrize("slot_bytes", [4096, 12_288, 65_536])
def test_tensors_may_be_strided_on_some_ranks(slot_bytes: int) -> None:
    seed = slot_bytes
    found = launch(
        2,
        CASES_FILE,
        "wrong_reductions",
        seed,
        150,
        slot_bytes,
        environment={"NBDIST_SLOT_BYTES": str(slot_bytes)},
    )
    assert found == [[], []], f"seed {seed}"
