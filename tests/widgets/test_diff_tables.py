"""The caption of `%dist_diff`."""

from __future__ import annotations

import pytest

from nbdist.widgets.looking import diff_table
from nbdist.wire import Comparison, LeafComparison


@pytest.mark.parametrize(
    ("leaves", "text"), [(1, "1 of 1 leaf differs."), (2, "2 of 2 leaves differ.")]
)
def test_the_caption_counts_the_leaves_that_differ(leaves: int, text: str) -> None:
    leaf = LeafComparison("x", "int", ((0, 1), (2,)))
    shown = str(diff_table("x", Comparison((0, 1, 2), (leaf,) * leaves, {})))
    assert f"{text} First, x differs on rank 2 from rank 0-1" in shown
