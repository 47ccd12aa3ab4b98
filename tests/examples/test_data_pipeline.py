"""The notebook with the slow data set."""

from __future__ import annotations

import re
from collections.abc import Callable


def test_the_wait_for_data_is_shown_and_removed(
    run_example: Callable[[str], str],
) -> None:
    printed = run_example("data_pipeline")
    waited = {
        name: float(seconds)
        for name, seconds in re.findall(
            r"^(one by one|read ahead|in memory) +([\d.]+) s", printed, re.MULTILINE
        )
    }
    assert waited["one by one"] > 1.8  # 29 steps of 16 reads of 4 ms
    assert waited["read ahead"] < waited["one by one"]
    assert waited["in memory"] < 0.1 * waited["one by one"]
    accuracy = re.search(r"training accuracy: ([\d.]+)%", printed)
    assert accuracy is not None
    assert float(accuracy[1]) > 90
    assert "'position': 640" in printed
    assert "the world has 3 ranks now" in printed
    assert "[0-2] every sample came once" in printed
