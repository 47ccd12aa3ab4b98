"""The notebook of workers."""

from __future__ import annotations

import re
from collections.abc import Callable


def test_workers_run_to_their_ends(run_example: Callable[[str], str]) -> None:
    printed = run_example("workers")
    rates = re.findall(r"learning rate ([\d.]+): accuracy ([\d.]+)%", printed)
    assert [rate for rate, _ in sorted(rates)] == ["0.01", "0.3", "3"]
    assert max(float(accuracy) for _, accuracy in rates) > 85
    assert "worker 4: failed (exit code 1)" in printed
    assert "ValueError: no such digit: 11" in printed
    assert "worker 5: failed (SIGKILL)" in printed
    assert "worker 6: running" in printed
    assert "['succeeded', 'failed', 'failed', 'stopped']" in printed
    assert "[ps 9] the sum of 2 workers: [3.0, 3.0, 3.0]" in printed
    assert "[0-1] 2 ranks answer" in printed
