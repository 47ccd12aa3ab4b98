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
from tests.remove_variables import remove_variables

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def _shared_cluster() -> Iterator[Cluster]:
    with Cluster(4, device="cpu") as cluster:
        yield cluster


@pytest.fixture
def cluster(_shared_cluster: Cluster) -> Iterator[Cluster]:
    """Four ranks. Afterwards all must live and be idle; their variables are removed."""
    yield _shared_cluster
    assert _shared_cluster.died() == {}
    states = _shared_cluster.status()
    assert {rank: state and state["what"] for rank, state in states.items()} == (
        dict.fromkeys(range(4))
    )
    _shared_cluster.run(remove_variables)


@pytest.fixture(scope="session", autouse=True)
def _importable() -> Iterator[None]:
    """Processes that a test starts import nbdist from this checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield
