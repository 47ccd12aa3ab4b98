"""The fault of one test does not fail other tests with the shared cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from nbdist import CellTimeout, Cluster
from nbdist.errors import NotRunning
from tests.processes import wait_until
from tests.shared_cluster import SharedCluster


@pytest.fixture
def shared() -> Iterator[SharedCluster]:
    shared = SharedCluster(1)
    yield shared
    shared.close()


def kill(cluster: Cluster) -> None:
    os.kill(cluster.ranks[0].pid, signal.SIGKILL)
    wait_until(lambda: bool(cluster.died()))


def hang(cluster: Cluster) -> None:
    """Start a cell that no interrupt ends, and leave it running."""
    endless = (
        "import time\n"
        "while True:\n"
        "    try: time.sleep(60)\n"
        "    except KeyboardInterrupt: pass"
    )
    with pytest.raises(CellTimeout, match="did not react"):
        cluster.execute(endless, timeout_s=0.1)


def stop(cluster: Cluster) -> None:
    cluster.stop()


@pytest.mark.parametrize("spoil", [kill, hang, stop])
def test_a_damaged_cluster_is_replaced(
    shared: SharedCluster, spoil: Callable[[Cluster], None]
) -> None:
    spoil(shared.ready())
    with pytest.raises((AssertionError, NotRunning)):
        shared.tidy()
    assert shared.ready().execute("print(rank)")[0].stdout == "0\n"


def test_an_intact_cluster_is_kept_without_the_variables(shared: SharedCluster) -> None:
    shared.ready().execute("left = 1")
    before = shared.ready()
    shared.tidy()
    assert shared.ready() is before
    assert before.execute("print('left' in globals())")[0].stdout == "False\n"
