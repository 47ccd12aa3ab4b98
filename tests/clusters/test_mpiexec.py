"""The MPI launcher that is used, and the MPI library that the ranks load with it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from nbdist import Cluster
from nbdist.clusters.launchers import mpiexec

ROOT = Path(__file__).parents[2]
LOADS = """
import os, sys
from pathlib import Path
from nbdist.clusters.launchers.mpiexec import Mpiexec
launcher = Mpiexec()
version = "from mpi4py import MPI; print(MPI.Get_library_version())"
command = launcher.argv(1, [sys.executable, "-c", version])
print(command[0], flush=True)
environment = {**os.environ, **launcher.environment(1, Path(sys.argv[1]))}
os.execve(command[0], command, environment)
"""


@pytest.mark.skipif(
    sys.prefix == sys.base_prefix, reason="Python runs in no virtual environment"
)
def test_a_python_outside_the_environment_uses_the_mpi_of_the_environment(
    tmp_path: Path,
):
    packages = sysconfig.get_paths()["purelib"]
    done = subprocess.run(
        [sys._base_executable, "-c", LOADS, str(tmp_path)],  # type: ignore[attr-defined]
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(ROOT), packages]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    launcher, version, *_ = [*done.stdout.splitlines(), "", ""]
    assert Path(launcher) == Path(sys.prefix) / "bin" / "mpiexec", done.stderr
    assert version.startswith("Open MPI"), done.stderr


def test_a_rank_that_waits_in_mpi_leaves_its_core_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sleeps. With sched_yield, the others would starve on some kernels."""
    monkeypatch.setattr(mpiexec, "cores", lambda: 1)
    with Cluster(n=2, device="cpu", threads=1) as running:
        running.execute(
            """
            import resource, time
            from mpi4py import MPI
            MPI.COMM_WORLD.Barrier()
            before = resource.getrusage(resource.RUSAGE_THREAD)
            if rank == 0:
                time.sleep(1)
            MPI.COMM_WORLD.Barrier()
            after = resource.getrusage(resource.RUSAGE_THREAD)
            sleeps = after.ru_nvcsw - before.ru_nvcsw
            """
        )
        assert running["sleeps"][1] > 100
