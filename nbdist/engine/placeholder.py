"""A process that keeps a rank's place with MPI's launcher. See `borrowed_place`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

__all__ = ["main"]

PREFIXES = ("OMPI_", "OPAL_", "PMIX_", "PRTE_", "PMI_", "HYDRA_", "MPI4PY_")
START_TIMEOUT_S = 60


def main() -> None:
    """Tell one process what MPI knows this one by, and end when it does."""
    folder = Path(sys.argv[1])
    rank = next(
        os.environ[name]
        for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
        if name in os.environ
    )
    os.mkfifo(folder / f"{rank}.line")
    (folder / f"{rank}.new").write_text(json.dumps(_identity()))
    (folder / f"{rank}.new").rename(folder / rank)
    signal.alarm(START_TIMEOUT_S)  # ends this process
    with (folder / f"{rank}.line").open("rb") as line:
        signal.alarm(0)
        line.read()  # returns when the other end has closed


def _identity() -> dict[str, str]:
    chosen = {k: v for k, v in os.environ.items() if k.startswith(PREFIXES)}
    return chosen | {
        name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ
    }


if __name__ == "__main__":
    main()
