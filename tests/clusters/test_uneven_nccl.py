"""Ranks that wait in NCCL for an idle rank are found by their counts of collectives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.clusters import uneven_nccl
from nbdist.clusters.uneven_nccl import LOOK_S, STEADY_S, UnevenNccl, Wait
from nbdist.ipc import endpoints
from nbdist.wire import NcclTotal, ProgressSnapshot, differ_in_nccl


class Ranks:
    """Three ranks: 0 and 1 are busy, and 2 is idle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.counts: dict[int, dict[str, int] | None] = {
            0: {"0": 3}, 1: {"0": 2}, 2: {"0": 2},
        }  # fmt: skip
        self.late: dict[int, float] = {}
        self.instruction = 1
        self.gpus: list[str | None] = ["a", "b", "c"]
        self.asked: list[str] = []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(uneven_nccl, "time", clock)
        self.detector = UnevenNccl(self)  # type: ignore[arg-type]

    @property
    def infos(self) -> list[Any]:
        return [SimpleNamespace(device_uuid=each) for each in self.gpus]

    def ask(self, target: str, ranks: Any = None) -> dict[int, Any]:
        self.asked.append(target)
        if target == endpoints.NCCL_CALLS:
            return {
                rank: each
                and {
                    name: NcclTotal(n, 0, self.late.get(rank, 0.0))
                    for name, n in each.items()
                }
                for rank, each in self.counts.items()
            }
        snapshot = ProgressSnapshot("In[1] line 2", None, self.instruction)
        return dict.fromkeys(ranks, snapshot)

    def look(self, seconds: float) -> list[Wait]:
        found = []
        end = self.now + seconds
        while self.now < end:
            found += self.detector.look({0, 1}, {2})
            self.now += LOOK_S
        return found


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_a_rank_that_has_queued_more_than_an_idle_one_waits(ranks: Ranks) -> None:
    assert ranks.look(STEADY_S) == []
    assert ranks.look(LOOK_S) == [Wait(0, "0", frozenset({2}))]


def test_a_rank_whose_time_out_has_passed_waits_for_a_busy_rank(ranks: Ranks) -> None:
    ranks.counts, ranks.late = {0: {"0": 3}, 1: {"0": 2}, 2: {"0": 3}}, {0: 5.0}
    assert ranks.look(LOOK_S) == [Wait(0, "0", frozenset({1}), 5.0)]


def test_a_time_out_of_a_rank_that_has_ended_its_cell_is_not_found(
    ranks: Ranks,
) -> None:
    ranks.counts, ranks.late = {0: {"0": 2}, 1: {"0": 2}, 2: {"0": 2}}, {2: 5.0}
    assert ranks.look(5 * STEADY_S) == []


def test_a_rank_that_goes_on_does_not_wait(ranks: Ranks) -> None:
    for _ in range(10):
        assert ranks.look(STEADY_S) == []
        ranks.instruction += 1


@pytest.mark.parametrize(
    "counts",
    [
        {0: {"0": 2}, 1: {"0": 2}, 2: {"0": 2}},
        {0: {"0": 2}, 1: {"0": 3}, 2: {"0": 3}},
        {0: {"0": 3}, 1: {"0": 2}, 2: None},  # it does not answer
        {0: {"pair": 3}, 1: {"pair": 2}, 2: {}},  # it is no member
    ],
)
def test_a_rank_that_waits_for_no_idle_rank_is_not_found(
    ranks: Ranks, counts: dict[int, dict[str, int] | None]
) -> None:
    ranks.counts = counts
    assert ranks.look(5 * STEADY_S) == []


@pytest.mark.parametrize(
    ("mine", "theirs", "waits"),
    [
        (NcclTotal(1, 0, sent=[(2, 2)]), NcclTotal(1, 0, received=[(0, 1)]), True),
        (NcclTotal(1, 0, received=[(2, 1)]), NcclTotal(1, 0), True),
        (NcclTotal(1, 0, sent=[(2, 2)]), NcclTotal(1, 0, received=[(0, 2)]), False),
        (NcclTotal(1, 0), NcclTotal(1, 0, received=[(0, 1)]), False),
        (NcclTotal(1, 0, sent=[(1, 2)]), NcclTotal(1, 0), False),  # to another rank
    ],
)
def test_a_message_that_an_idle_rank_leaves_out(
    mine: NcclTotal, theirs: NcclTotal, waits: bool
) -> None:
    assert mine.exceeds(0, theirs, 2) == waits
    totals = {0: {"0": mine}, 2: {"0": theirs}}
    behind = frozenset({2}) if waits else frozenset()
    assert uneven_nccl._behind(totals, [2], "0", 0) == behind
    is_even = not waits and not theirs.exceeds(2, mine, 0)
    assert differ_in_nccl(totals) != is_even


@pytest.mark.parametrize("gpus", [["a", "a", "b"], [None, None, None]])
def test_ranks_that_do_not_use_nccl_are_not_asked(
    ranks: Ranks, gpus: list[str | None]
) -> None:
    ranks.gpus = gpus
    assert ranks.look(5 * STEADY_S) == []
    assert ranks.asked == []
