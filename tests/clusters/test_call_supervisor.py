"""A rank is released from a collective that another rank will not enter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist import Cluster
from nbdist.clusters import call_supervisor
from nbdist.clusters.call_supervisor import (
    PROBE_S,
    STEADY_BETWEEN_HOSTS_S,
    STEADY_S,
    CallSupervisor,
    Waiting,
)
from nbdist.ipc import endpoints
from nbdist.wire import CollectiveCall, NcclTotal

BARRIER = CollectiveCall(1, 1, "barrier", None, None, "-", (), "none", members=(0, 1))


class Ranks:
    """Three ranks: rank 1 waits in a barrier with rank 0, and rank 2 has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.busy = {0, 1}
        self.collective = BARRIER
        self.released: list[str] = []
        self.died: dict[int, object] = {}
        self.infos = [SimpleNamespace(rank=rank, host="a") for rank in range(3)]
        self.answers: dict[int, object] = {}
        self._supervisor = CallSupervisor(self, None)  # type: ignore[arg-type]
        self._waiting: Waiting = {}
        monkeypatch.setattr(self._supervisor, "_busy", lambda: self.busy)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(call_supervisor, "time", clock)

    def ask(
        self, target: str, *args: Any, ranks: Any, timeout_s: float = 0.0
    ) -> dict[int, Any]:
        if target == endpoints.RELEASE:
            self.released += args
            return {}
        return dict.fromkeys(ranks, self.collective)

    def look(self, seconds: float) -> None:
        """Have the supervisor look at the ranks again and again."""
        call: Any = SimpleNamespace(
            paused={},
            processes={0: "a", 1: "b", 2: "c"},
            unfinished=self.infos[1:2],
            answers=self.answers,
        )
        end = self.now + seconds
        while self.now < end:
            self._waiting = self._supervisor._release_waiting(call, self._waiting)
            self.now += PROBE_S


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_a_rank_whose_peer_has_ended_is_released(ranks: Ranks) -> None:
    ranks.busy = {1}
    ranks.look(STEADY_S + 2 * PROBE_S)
    assert ranks.released[0] == ("released from barrier: the cell of rank 0 has ended")


def test_a_rank_has_time_to_leave_a_collective_after_its_peer(ranks: Ranks) -> None:
    """The time both ranks have spent in the collective before does not count."""
    ranks.look(10)
    ranks.busy = {1}
    ranks.look(STEADY_S - PROBE_S)
    assert ranks.released == []
    ranks.look(3 * PROBE_S)
    assert ranks.released


def test_a_rank_whose_peers_have_all_arrived_is_not_released(ranks: Ranks) -> None:
    ranks.collective = replace(BARRIER, has_met=True)
    ranks.busy = {1}
    ranks.look(10)
    assert ranks.released == []
    ranks.answers[0] = SimpleNamespace(broken=True)  # it has left in the middle
    ranks.look(STEADY_S + 2 * PROBE_S)
    assert ranks.released


def test_what_ranks_of_another_host_have_sent_has_time_to_arrive(ranks: Ranks) -> None:
    ranks.infos[1].host = "b"
    ranks.busy = {1}
    ranks.look(STEADY_BETWEEN_HOSTS_S - PROBE_S)
    assert ranks.released == []
    ranks.look(3 * PROBE_S)
    assert ranks.released


SLOW_TO_PASS = """
import time
from nbdist.collectives.registry import live
passed = []

def slow(wait):
    def slowly(check, resume):
        def late():
            if not passed:
                passed.append(1)
                time.sleep(1.5)
            return resume()
        return wait(check, late)
    return slowly

if rank == 3:
    barriers = [group._connection.barrier for group in live]
    for barrier in barriers:
        barrier.wait = slow(barrier.wait)
"""


@pytest.fixture
def slow(cluster: Cluster) -> Iterator[Cluster]:
    """Rank 3 takes long to see that all have arrived in a barrier."""
    cluster.execute(SLOW_TO_PASS)
    yield cluster
    cluster.execute("if rank == 3:\n    for barrier in barriers: del barrier.wait")


@pytest.mark.parametrize(
    "operation",
    ["nbdist.barrier()", "dist.barrier()", "nbdist.all_reduce(torch.ones(3))"],
)
def test_a_slow_rank_passes_a_barrier_after_the_other_ranks_have_ended(
    slow: Cluster, operation: str
) -> None:
    slow.execute(f"if rank != 3: time.sleep(0.3)\n{operation}", timeout_s=30)
    assert slow.pull("passed", [3]) == [[1]]


@pytest.mark.parametrize(
    ("gpus", "counts", "differ"),
    [
        (["GPU-a", "GPU-b"], [{"0": 2}, {"0": 1}], True),
        (["GPU-a", "GPU-b"], [{"0": 2}, {"0": 2}], False),
        (["GPU-a", "GPU-b"], [{"0": 2, "1": 7}, {"0": 2}], False),  # a smaller group
        (["GPU-a", "GPU-b"], [{"0": 2}, None], False),  # no answer
        (["GPU-a", "GPU-a"], [{"0": 2}, {"0": 1}], False),  # NCCL is not used
        ([None, None], [{"0": 0}, {"0": 0}], False),
    ],
)
@pytest.mark.parametrize("late_s", [0.0, 2.0])
def test_work_of_nccl_that_not_all_ranks_have_queued_or_that_is_late_is_noticed(
    gpus: list[str | None],
    counts: list[dict[str, int] | None],
    differ: bool,
    late_s: float,
) -> None:
    answers = {
        rank: each and {name: NcclTotal(n, 0, late_s) for name, n in each.items()}
        for rank, each in enumerate(counts)
    }
    registry: Any = SimpleNamespace(
        infos=[SimpleNamespace(device_uuid=gpu) for gpu in gpus],
        ask=lambda target: answers,
    )
    supervisor = CallSupervisor(registry, None)  # type: ignore[arg-type]
    is_late = bool(late_s) and gpus == ["GPU-a", "GPU-b"]
    assert supervisor._differ_in_nccl() is (differ or is_late)
