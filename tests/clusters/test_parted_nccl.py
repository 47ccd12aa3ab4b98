"""Ranks that wait because they have called different collectives of NCCL are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.clusters.parted_nccl import PartedNccl
from nbdist.clusters.uneven_nccl import STEADY_S
from nbdist.wire import NcclCall, NcclTotal

SUM, COPY = "all_reduce(Float, 3 elements)", "broadcast(Float, 3 elements)"


def calls(*kinds: str, done: int) -> dict[str, dict[int, NcclCall]]:
    """A rank's calls in the group "0", of which it has completed some."""
    numbered = enumerate(kinds, start=1)
    return {"0": {number: NcclCall(kind, number <= done) for number, kind in numbered}}


class Ranks:
    """Three ranks that answer with their calls."""

    def __init__(self, *traces: dict[str, dict[int, NcclCall]] | None) -> None:
        self.traces = dict(enumerate(traces))
        self.gpus: list[str | None] = ["a", "b", "c"]
        self.asked = 0

    @property
    def infos(self) -> list[Any]:
        return [SimpleNamespace(device_uuid=each) for each in self.gpus]

    def ask(self, _target: str) -> dict[int, Any]:
        self.asked += 1
        return self.traces


def found(ranks: Ranks, quiet_s: float = STEADY_S) -> str:
    parting = PartedNccl(ranks).look(quiet_s)  # type: ignore[arg-type]
    return str(parting or "")


def test_the_first_different_call_is_found() -> None:
    same, odd = calls(SUM, SUM, SUM, done=1), calls(SUM, COPY, SUM, done=1)
    said = found(Ranks(same, odd, same))
    assert "at collective #2 of the group" in said
    assert f"rank 0,2 called {SUM}; rank 1 called {COPY}" in said


@pytest.mark.parametrize(
    "odd",
    [
        calls(SUM, SUM, done=1),  # it waits in the same call
        calls(SUM, done=1),  # it has not come
        calls(COPY, SUM, done=1),  # its other call was completed
        {"0": {2: NcclCall(SUM, False)}},  # the first call is no longer recorded
        {"pair": {1: NcclCall(COPY, False)}},  # it is in another group
        None,  # it does not answer
    ],
)
def test_ranks_that_wait_for_something_else_are_not_found(
    odd: dict[str, dict[int, NcclCall]] | None,
) -> None:
    same = calls(SUM, SUM, done=1)
    assert found(Ranks(same, same, odd)) == ""


@pytest.mark.parametrize("gpus", [["a", "a", "b"], [None, None, None]])
def test_ranks_that_do_not_use_nccl_are_not_asked(gpus: list[str | None]) -> None:
    ranks = Ranks(calls(SUM, done=0), calls(COPY, done=0))
    ranks.gpus = gpus
    assert found(ranks) == ""
    assert not ranks.asked


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ([(2, 7), (2, 8), (2, 7)], f"rank 0,2 called {SUM}; rank 1 called {COPY}"),
        ([(2, 7), (2, 7), (2, 7)], ""),
        ([(2, 7), (1, 8), (2, 7)], ""),  # it has yet to make a call
    ],
)
def test_completed_calls_are_compared_by_their_digests(
    totals: list[tuple[int, int]], expected: str
) -> None:
    ranks = Ranks(*(calls(SUM, kind, done=2) for kind in (SUM, COPY, SUM)))
    digests = [{"0": NcclTotal(*total)} for total in totals]
    said = PartedNccl(ranks).look_back(digests)  # type: ignore[arg-type]
    assert expected in said
    assert bool(expected) == bool(said) == bool(ranks.asked)


def test_a_different_call_that_is_no_longer_recorded_is_an_error() -> None:
    ranks = Ranks(calls(SUM, done=1), calls(SUM, done=1))
    digests = [{"0": NcclTotal(9, number)} for number in range(2)]
    said = PartedNccl(ranks).look_back(digests)  # type: ignore[arg-type]
    assert "no longer have" in said


def test_ranks_are_asked_once_while_none_makes_progress() -> None:
    ranks = Ranks(calls(SUM, done=0), calls(SUM, done=0))
    detector = PartedNccl(ranks)  # type: ignore[arg-type]
    for quiet_s in (0.0, STEADY_S / 2, STEADY_S, 2 * STEADY_S, 0.0, STEADY_S):
        detector.look(quiet_s)
    assert ranks.asked == 2
