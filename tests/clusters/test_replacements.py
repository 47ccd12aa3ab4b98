"""A rank is replaced however often, and however slowly its process ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import psutil
import pytest

from nbdist import Cluster
from nbdist.clusters import rank_registry
from nbdist.errors import RankDied
from tests.held_exit import HeldExit

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def _pair() -> Iterator[Cluster]:
    with Cluster(2, device="cpu", threads=1) as cluster:
        yield cluster


@pytest.fixture
def pair(_pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Two ranks, of which each has a number of its own in `kept`."""
    monkeypatch.setattr(_pair, "on_note", lambda _: None)
    _pair.execute("kept = rank + 5")
    return _pair


@pytest.fixture
def held(pair: Cluster) -> Iterator[HeldExit]:
    """The exit of rank 1."""
    try:
        held = HeldExit(pair.infos[1].pid)
    except PermissionError as error:
        pytest.skip(f"cannot trace a process: {error}")
    yield held
    held.release()


def test_a_rank_that_ends_slowly_is_replaced_when_it_has_ended(
    pair: Cluster, held: HeldExit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_registry, "ANSWER_TIMEOUT_S", 0.1)
    notes: list[str] = []

    def release(note: str) -> None:
        notes.append(note)
        held.release()

    pair._live().on_note = release
    pair.replace([1])
    assert "rank 1 was killed, and the system has not ended its process" in notes[0]
    assert pair["kept"] == [5, 5]
    assert pair["rank"] == [0, 1]


def test_no_cell_runs_on_some_ranks_while_another_does_not_end(
    pair: Cluster, held: HeldExit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_registry, "ANSWER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(rank_registry, "KILL_TIMEOUT_S", 0.1)
    said = r"rank 1 was killed.*%dist_restart -r 1 waits again"
    with pytest.raises(RankDied, match=said):
        pair.replace([1])
    with pytest.raises(RankDied, match=said):
        pair.execute("ran = True")
    assert pair.execute("ran = rank", ranks=[0])[0].ok
    monkeypatch.undo()
    again = threading.Thread(target=pair.replace, args=[[1]])
    again.start()
    held.release()
    again.join(WITHIN_S)
    assert not again.is_alive()
    assert pair["ran"] == [0, 0]


@pytest.mark.parametrize(
    "times",
    [12, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_later_replacements_leave_no_more_than_the_first(
    pair: Cluster, times: int
) -> None:
    """Neither in the notebook's process, nor in another of the cluster."""
    for rank in (0, 1):  # the first ranks have other descriptors than their successors
        pair.replace([rank])
    before = _counted(psutil.Process.num_fds), _counted(psutil.Process.num_threads)
    for time in range(times):
        pair.replace([time % 2])
    assert pair["kept"] == [6, 6]  # rank 0 was replaced first, by a copy of rank 1
    after = _counted(psutil.Process.num_fds), _counted(psutil.Process.num_threads)
    assert after == before


def _counted(count: Callable[[psutil.Process], int]) -> list[int]:
    me = psutil.Process()
    return [count(me), *sorted(map(count, me.children(recursive=True)))]
