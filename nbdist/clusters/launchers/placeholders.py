"""Runs `mpiexec` with a placeholder for each rank that torchrun has started.

    python -m nbdist.clusters.launchers.placeholders FOLDER N

`nbdist.engine.torchrun_bootstrap` describes placeholders. This program ends when the
ranks have ended, and removes the folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from nbdist.clusters.launchers.mpiexec import Mpiexec
from nbdist.config import ClusterConfig

__all__ = ["main"]

PLACEHOLDER = "nbdist.engine.torchrun_bootstrap"


def main() -> None:
    """Start the placeholders, and wait until all have ended."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # The ranks also get the signal, and this program ends with them. The handler
        # does nothing. mpiexec would inherit SIG_IGN, but not a handler.
        signal.signal(number, lambda *_: None)
    folder, n = Path(sys.argv[1]), int(sys.argv[2])
    try:
        launcher = Mpiexec(ClusterConfig.from_environment().mpiexec)
        command = [sys.executable, "-m", PLACEHOLDER, str(folder)]
        environment = {**os.environ, **launcher.environment(n, folder)}
        code = subprocess.call(launcher.argv(n, command), env=environment)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
