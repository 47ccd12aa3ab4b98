"""Run an `mpiexec` that keeps places for ranks which others have started.

    python -m nbdist.cluster.launchers.places FOLDER N

It ends, and removes the folder, once those ranks have ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from nbdist.cluster.launchers.mpiexec import Mpiexec
from nbdist.config import ClusterConfig

__all__ = ["main"]


def main() -> None:
    """Start one placeholder for each rank; wait for all of them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # The ranks get it too, and when they end, so does this. Not ignored: mpiexec
        # would inherit that.
        signal.signal(number, lambda *_: None)
    folder, n = Path(sys.argv[1]), int(sys.argv[2])
    try:
        launcher = Mpiexec(ClusterConfig.from_environment().mpiexec)
        command = [sys.executable, "-m", "nbdist.engine.placeholder", str(folder)]
        environment = {**os.environ, **launcher.environment(n, folder)}
        code = subprocess.call(launcher.argv(n, command), env=environment)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
