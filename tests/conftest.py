"""What tests of several folders share: a cluster of four CPU ranks, a JupyterLab."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import Cluster
from tests.lab import _lab_page as _lab_page
from tests.lab import lab as lab
from tests.lab import lab_browser as lab_browser
from tests.lab import lab_server as lab_server

ROOT = Path(__file__).parent.parent


def forget() -> None:
    """On a rank: remove the variables that cells have made."""
    from IPython import get_ipython

    shell = get_ipython()
    for name in set(shell.user_ns) - set(shell.user_ns_hidden):
        if not name.startswith("_"):
            del shell.user_ns[name]


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
    _shared_cluster.run(forget)


@pytest.fixture(scope="session", autouse=True)
def _importable() -> Iterator[None]:
    """Processes that a test starts import nbdist from this checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield
