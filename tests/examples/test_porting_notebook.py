"""The notebook that takes a training to four ranks, and mends three faults."""

from __future__ import annotations

import re
from collections.abc import Callable


def test_a_training_is_ported_and_its_faults_found_mended_and_resumed(
    run_example: Callable[..., str],
) -> None:
    printed = run_example("porting")
    reached = dict(re.findall(r"(\w[\w ]*): test accuracy: ([\d.]+)%", printed))
    for step in ("one process", "four ranks", "epoch 1", "saved", "resumed"):
        assert float(reached[step]) > 80, (step, reached)
    assert reached["resumed"] == reached["saved"]
    assert "model is equal on rank 0-3, bit for bit" in printed
    # The collective that one rank calls: both lines are named.
    assert re.search(r"0 +#\d+ +all_reduce .*int64 .*In\[9\] line 7", printed)
    assert re.search(
        r"parted at call #\d+: ranks 1-3 called .*; rank 0 called", printed
    )
    # The NaN: the rank and its rows.
    assert re.search(r"rank 2 of 4 .*NotFinite: step 1: the output of module", printed)
    assert re.search(r"^2 +100$", printed, re.MULTILINE)
    # The slow data.
    assert re.search(r"all_reduce .*rank 3 \(\d+%\)", printed)
    waits = re.findall(
        r"rank 3: \d+ steps in \S+ s, of which \S+ s \((\d+)%\)", printed
    )
    slow, fast = map(int, waits)
    assert slow > 50 > fast
