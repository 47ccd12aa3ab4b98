"""Fixtures of several folders: a cluster of four CPU ranks, and a JupyterLab."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from nbdist import Cluster
from nbdist.clusters import call_supervisor, startup
from nbdist.ipc.fork_messages import FORKED, SWITCHED_OFF
from tests import failure_report
from tests.jupyterlab_driver import _lab_page as _lab_page
from tests.jupyterlab_driver import lab as lab
from tests.jupyterlab_driver import lab_browser as lab_browser
from tests.jupyterlab_driver import lab_server as lab_server
from tests.jupyterlab_driver import notebook7 as notebook7
from tests.jupyterlab_driver import second_tab as second_tab
from tests.processes import HANG_S
from tests.shared_cluster import SharedCluster

ROOT = Path(__file__).parent.parent
HAS_FAILED = pytest.StashKey[bool]()

# Other processes may use the cores: no property is about time.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")

# A shell's job in the background ignores SIGINT, by which tests interrupt cells. Only a
# handler is replaced by the default in the processes that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note in the report on how many simulated GPUs a test must run."""
    marker = item.get_closest_marker("gpus")
    if marker is not None:
        item.user_properties.append(("gpus", " ".join(map(str, marker.args))))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """Add to the report of a failure what helps to repeat and to explain it."""
    report = yield
    if report.failed:
        item.stash[HAS_FAILED] = True
        report.sections += failure_report.sections(item.nodeid)
    return report


@pytest.fixture(scope="session", autouse=True)
def _kept_logs() -> Iterator[None]:
    yield from failure_report.kept_logs()


@pytest.fixture(scope="session")
def _shared_cluster() -> Iterator[SharedCluster]:
    shared = SharedCluster(4)
    yield shared
    shared.close()


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest, _shared_cluster: SharedCluster
) -> Iterator[Cluster]:
    """Four ranks, which must live and be idle after the test. Variables are removed.

    The ranks of a test that has failed may be damaged: the next one has others.
    """
    yield _shared_cluster.ready()
    if HAS_FAILED in request.node.stash:
        _shared_cluster.close()
    else:
        _shared_cluster.tidy()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ranks long to react to an interrupt, because the machine may be busy."""
    monkeypatch.setattr(call_supervisor, "INTERRUPT_GRACE_S", HANG_S)


@pytest.fixture(scope="session", autouse=True)
def _importable() -> Iterator[None]:
    """Make processes that a test starts import nbdist from this checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def _starts() -> Iterator[list[tuple[str, str]]]:
    """The expected and the actual `RankInfo.started` of each rank."""
    starts: list[tuple[str, str]] = []

    def recorded(*args: Any, **options: Any) -> startup.Started:
        is_off = os.environ.get("NBDIST_PRELOAD") == "0"
        started = startup.start(*args, **options)
        way = SWITCHED_OFF if is_off else FORKED
        starts.extend((way, info.started) for info in started.infos)
        return started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nbdist.clusters.cluster.start", recorded)
        yield starts


@pytest.fixture(autouse=True)
def _all_forked(
    request: pytest.FixtureRequest, _starts: list[tuple[str, str]]
) -> Iterator[None]:
    """Fail a test whose ranks were not forked, unless NBDIST_PRELOAD=0 is set.

    A test of ranks that cannot be forked has the marker `not_forked`.
    """
    failure_report.forget_ended_clusters()
    yield
    seen = _starts.copy()
    _starts.clear()
    if request.node.get_closest_marker("not_forked") is None:
        assert [was for wanted, was in seen if was != wanted] == []
