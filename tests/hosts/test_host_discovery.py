"""The script that finds hosts is followed for as long as the cluster runs."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path

import pytest

from nbdist.clusters.hosts import discovery
from nbdist.clusters.hosts.discovery import HostDiscovery
from nbdist.clusters.hosts.host_list import HostSlots
from nbdist.errors import CellError, NbdistError, RankDied, StartError

WITHIN_S = 30.0


@pytest.mark.parametrize("kind", [StartError, RankDied, CellError])
def test_hosts_are_followed_after_a_change_that_has_failed(
    kind: type[NbdistError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "PERIOD_S", 0.01)
    script = tmp_path / "hosts.sh"
    listed = tmp_path / "hosts"
    listed.write_text("one:1\n")
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o700)
    adopted: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    notes: queue.SimpleQueue[str] = queue.SimpleQueue()

    def adopt(hosts: Sequence[HostSlots]) -> None:
        adopted.put([each.name for each in hosts])
        if len(hosts) == 1:
            raise kind("rank 1 died")

    following = HostDiscovery(str(script), [], adopt, lambda: False, notes.put)
    assert adopted.get(timeout=WITHIN_S) == ["one"]
    assert "were not adopted: rank 1 died" in notes.get(timeout=WITHIN_S)
    later = tmp_path / "later"
    later.write_text("one:1\ntwo:2\n")
    later.replace(listed)
    assert adopted.get(timeout=WITHIN_S) == ["one", "two"]
    following.close()
