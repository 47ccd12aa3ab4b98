"""The notebook on data, pipeline and tensor parallel training."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

WAYS = ("one process", "data parallel", "pipeline", "tensor parallel")


@pytest.mark.skipif(
    torch.__version__ < "2.8",
    reason="parallelize_module of torch 2.7 applies a plan of nested names wrongly",
)
def test_every_parallel_training_equals_one_process(
    run_example: Callable[[str], str],
) -> None:
    printed = run_example("model_parallel")
    accuracies = []
    for way in WAYS:
        by_rank = re.findall(rf"\] {way}: test accuracy: ([\d.]+)%", printed)
        assert by_rank, printed
        accuracies += by_rank
        off = re.search(rf"{way}: weights off by (\S+), losses by (\S+)", printed)
        assert off is not None, printed
        assert max(float(off[1]), float(off[2])) < 1e-9, way
    assert len(set(accuracies)) == 1, accuracies
    assert float(accuracies[0]) > 85
    blocks = [64 * 128 + 128, 128 * 64 + 64, 64 * 32 + 32, 32 * 10 + 10]
    for rank, parameters in enumerate(blocks):
        assert f"[{rank}] I hold {parameters} parameters" in printed
    # A quarter of two weights and of the first bias; the rest is on every rank.
    divided = (64 * 128 + 128 + 128 * 64) // 4 + 64 + sum(blocks[2:])
    for parameters in (sum(blocks), divided):
        assert re.search(rf"\] I hold {parameters} parameters", printed), parameters
    assert re.search(r"\] 0\.0: \[32, 64\] of \[128, 64\] here", printed)
    assert re.search(r"\] 1\.0: \[64, 32\] of \[64, 128\] here", printed)
