"""Run an `mpiexec` of placeholders for ranks that torchrun has started.

    python -m nbdist.cluster.launchers.placeholders FOLDER N

`nbdist.engine.torchrun_bootstrap` says what a placeholder is. This program ends, and
removes the folder, once the ranks have ended.
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

PLACEHOLDER = "nbdist.engine.torchrun_bootstrap"


def main() -> None:
    """Start one placeholder for each rank; wait for all of them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # The ranks get the signal too, and when they end, so does this. A handler, for
        # mpiexec would inherit a signal that is ignored.
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
