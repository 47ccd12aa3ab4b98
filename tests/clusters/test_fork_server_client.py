"""The client of the fork server, without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.clusters import fork_server_client
from nbdist.clusters.fork_server_client import CannotFork
from nbdist.config import ForkConfig
from tests.guarded import is_held


class Server:
    """A fork server that refuses everything, and notes who holds the lock."""

    pid = 7
    why_not = "it refuses"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def _ask(self, what: str) -> bool:
        assert is_held(fork_server_client._lock), f"{what} without the lock"
        self.asked.append(what)
        return False

    def prepare(self, *_: object) -> str:
        self._ask("prepare")
        return ""

    def offer(self, *_: object) -> bool:
        return self._ask("offer")

    def await_ready(self, _timeout_s: float) -> bool:
        return self._ask("ready")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(fork_server_client, "_server", made)
    monkeypatch.setattr(fork_server_client, "_prepare", made.prepare)
    return made


def refused(run_dir: Path) -> None:
    with pytest.raises(CannotFork, match="it refuses"):
        fork_server_client.serve(run_dir, {}, ForkConfig())
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("use", "asked"),
    [
        (refused, ["prepare", "prepare", "offer", "prepare", "offer"]),
        (lambda _: fork_server_client.prepare({}), ["prepare"]),
        (lambda _: fork_server_client.await_ready(1.0), ["ready"]),
    ],
    ids=["serve", "prepare", "await_ready"],
)
def test_one_thread_at_a_time_uses_the_fork_server(
    use: Callable[[Path], None], asked: list[str], server: Server, tmp_path: Path
) -> None:
    use(tmp_path)
    assert server.asked == asked
    assert not is_held(fork_server_client._lock)
