"""What a failing test prints: how to run it alone, and the logs of its clusters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest

from nbdist.clusters.supervisor_client import SupervisorClient
from tests.seed import SEED

__all__ = ["forget_ended_clusters", "kept_logs", "sections"]

LINES = 20
"""The last lines of each log that are printed."""
LOGS = "*.log", "*.stderr", "*.failed", "*.reason"
_clusters: WeakSet[SupervisorClient] = WeakSet()
_ended: list[tuple[str, str]] = []
"""The logs of the clusters that have ended during the test."""


def kept_logs() -> Iterator[None]:
    """Know the clusters of this process, until the generator ends."""
    begin, close = SupervisorClient.__init__, SupervisorClient.close

    def known(self: SupervisorClient, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        _clusters.add(self)

    def read_and_close(self: SupervisorClient, *args: Any, **options: Any) -> None:
        if self in _clusters:
            _clusters.remove(self)
            _ended.extend(_logs(self))
        close(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SupervisorClient, "__init__", known)
        patch.setattr(SupervisorClient, "close", read_and_close)
        yield


def forget_ended_clusters() -> None:
    """Forget the clusters that ended before the next test."""
    _ended.clear()


def sections(nodeid: str) -> list[tuple[str, str]]:
    """The titles and texts of what to print below a test that has failed."""
    command = f'NBDIST_SEED={SEED} .venv/bin/python -m pytest "{nodeid}"'
    living = [each for client in list(_clusters) for each in _logs(client)]
    return [("to run it alone", command), *_ended, *living]


def _logs(client: SupervisorClient) -> list[tuple[str, str]]:
    logs = []
    for path in (path for form in LOGS for path in sorted(client.run_dir.glob(form))):
        with contextlib.suppress(FileNotFoundError):  # the cluster is being removed
            lines = path.read_text(errors="replace").splitlines()[-LINES:]
            if lines:
                logs.append((f"{path.name} of {path.parent}", "\n".join(lines)))
    return logs
