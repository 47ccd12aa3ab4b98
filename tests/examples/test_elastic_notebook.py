"""The notebook in which a cell continues after the death of a rank."""

from __future__ import annotations

import re
from collections.abc import Callable


def test_the_cell_continues_after_the_death(run_example: Callable[[str], str]) -> None:
    printed = run_example("elastic")
    assert "has died with SIGKILL" in printed
    assert "rank 2 was replaced" in printed
    assert re.search(r"0-1,3 +True\n2 +False", printed)
    assert "[0-3] step 100, each sample seen [4] times" in printed
    final = re.search(r"\[0-3\] test accuracy: ([\d.]+)%", printed)
    assert final is not None, printed  # all ranks alike, to the checksum's last bit
    assert float(final[1]) > 75
