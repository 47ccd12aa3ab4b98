"""The notebook in which a rank dies."""

from __future__ import annotations

import re
from collections.abc import Callable


def test_the_training_continues_after_the_death(
    run_example: Callable[[str], str],
) -> None:
    printed = run_example("a_rank_dies")
    assert "has died with SIGKILL" in printed
    assert "rank 2 was replaced" in printed
    assert re.search(r"0-1,3 +\(True, 80\)\n2 +\(False, 80\)", printed)
    final = re.search(r"\[0-3\] step 200, test accuracy ([\d.]+)%", printed)
    assert final is not None, printed  # all ranks alike, to the checksum's last bit
    assert float(final[1]) > 85
