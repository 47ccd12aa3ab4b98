"""Every public all-reduce uses the compiled part, and a small one after few frames."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import launch

from nbdist.collectives.transports.native import find_compiled

PATHS = str(Path(__file__).with_name("reduction_paths.py"))
pytestmark = pytest.mark.skipif(find_compiled() is None, reason="nothing was compiled")


def test_every_public_all_reduce_uses_the_compiled_part() -> None:
    for used in launch(2, PATHS, "used_plans"):
        assert [name for name, reached in used.items() if not reached] == []


def test_a_small_all_reduce_is_compiled_after_few_frames() -> None:
    for entered in launch(2, PATHS, "frames"):
        assert len(entered) <= 5, entered
