"""What a failing test prints."""

from __future__ import annotations

from nbdist import Cluster
from tests.failure_report import forget_ended_clusters, sections
from tests.seed import SEED


def written(text: str) -> list[str]:
    """The titles of the logs that have this text."""
    return [title for title, log in sections("file.py::test") if text in log]


def test_a_failure_has_the_command_that_repeats_it() -> None:
    title, command = sections("tests/file.py::test[a b]")[0]
    assert title == "to run it alone"
    assert command.startswith(f"NBDIST_SEED={SEED} ")
    assert command.endswith('pytest "tests/file.py::test[a b]"')


def test_a_failure_has_the_logs_of_clusters_that_live_and_that_have_ended() -> None:
    with Cluster(1, device="cpu") as cluster:
        cluster.execute("import os; _ = os.write(2, b'from C\\n')")
        assert len(written("from C")) == 1
    assert len(written("from C")) == 1
    forget_ended_clusters()
    assert written("from C") == []
