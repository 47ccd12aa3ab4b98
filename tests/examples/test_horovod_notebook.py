"""The notebooks with Horovod's names, for torch and for Keras."""

from __future__ import annotations

import re
from collections.abc import Callable


def test_horovod(run_example: Callable[[str], str]) -> None:
    printed = run_example("horovod")
    found = re.search(r"test accuracy: ([\d.]+)%, the same .*: True", printed)
    assert found is not None, printed
    assert float(found[1]) > 90
    for rank in range(4):
        assert f"[{rank}] at my last step we were {4 - rank}; the last" in printed
    assert "[(0, 4), (1, 4), (2, 4), (3, 4)]" in printed


def test_keras(run_example: Callable[[str], str]) -> None:
    printed = run_example("keras")
    found = re.search(r"\[0-3\] test accuracy: ([\d.]+)%", printed)
    assert found is not None, printed  # all ranks alike
    assert float(found[1]) > 85
