"""The notebook in which a rank dies, run once from its first cell to its last."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TIME_LIMIT_S = 150


def test_the_training_goes_on_after_the_death() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "run.py", "a_rank_dies"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has died with SIGKILL" in done.stdout
    assert "rank 2 was replaced" in done.stdout
    assert re.search(r"0-1,3 +\(True, 80\)\n2 +\(False, 80\)", done.stdout)
    final = re.search(r"\[0-3\] step 200, test accuracy ([\d.]+)%", done.stdout)
    assert final is not None, done.stdout  # all ranks alike, to the checksum's last bit
    assert float(final[1]) > 85
