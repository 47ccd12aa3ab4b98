"""A wall clock for the processes of a test that another test can move."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["library", "why_not"]


def why_not() -> str:
    """Why it cannot be built here; "" if it can."""
    return "" if shutil.which("cc") else "needs a C compiler"


def library(folder: Path) -> Path:
    """Build the library in a folder unless it is there. `fake_clock.c` says its use."""
    built = folder / "fake_clock.so"
    if not built.exists():
        source = Path(__file__).with_name("fake_clock.c")
        options = ("-shared", "-fPIC", "-O1", "-o", str(built), str(source))
        subprocess.run(["cc", *options], check=True)
    return built
