"""What tests of several folders share: a cluster of four CPU ranks, a JupyterLab."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import Cluster
from tests.jupyterlab_driver import _lab_page as _lab_page
from tests.jupyterlab_driver import lab as lab
from tests.jupyterlab_driver import lab_browser as lab_browser
from tests.jupyterlab_driver import lab_server as lab_server
from tests.shared_cluster import SharedCluster

ROOT = Path(__file__).parent.parent


def pytest_collection_finish() -> None:
    """Check that no test module has initialised MPI before nbdist could.

    A process without a launcher then leaves 16 MB in /dev/shm at its end; see
    `nbdist.collectives.before_mpi`.
    """
    maps = Path("/proc/self/maps")
    if maps.exists() and "/sm_segment." in maps.read_text(errors="replace"):
        raise pytest.UsageError(
            "a test module imports mpi4py.MPI before nbdist: import it in the function "
            "that runs on ranks"
        )


@pytest.fixture(scope="session")
def _shared_cluster() -> Iterator[SharedCluster]:
    shared = SharedCluster(4)
    yield shared
    shared.close()


@pytest.fixture
def cluster(_shared_cluster: SharedCluster) -> Iterator[Cluster]:
    """Four ranks. Afterwards all must live and be idle; their variables are removed."""
    yield _shared_cluster.ready()
    _shared_cluster.tidy()


@pytest.fixture(scope="session", autouse=True)
def _importable() -> Iterator[None]:
    """Processes that a test starts import nbdist from this checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield
