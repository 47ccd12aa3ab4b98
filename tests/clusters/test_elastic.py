"""A training continues in one cell when ranks die and when the world changes size."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_training import STEPS, TRAIN, assert_trained, prepare, weights

from nbdist.clusters.cluster import Cluster
from nbdist.errors import CellError, UsageError
from tests.processes import HANG_S, wait_until


@pytest.fixture(scope="module")
def _elastic_cluster() -> Iterator[Cluster]:
    with Cluster(n=4, device="cpu", threads=1) as running:
        yield running


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def cluster(_elastic_cluster: Cluster, notes: list[str], tmp_path: Path) -> Cluster:
    """Four ranks with the training defined."""
    _elastic_cluster.scale(4, drop=True)
    _elastic_cluster.on_note = notes.append
    prepare(_elastic_cluster, tmp_path)
    return _elastic_cluster


@pytest.fixture(scope="module")
def reference(
    _elastic_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """The weights of an undisturbed training."""
    prepare(_elastic_cluster, tmp_path_factory.mktemp("undisturbed"))
    _elastic_cluster.execute(TRAIN, timeout_s=60)
    assert _elastic_cluster["result"] == [STEPS] * 4
    return weights(_elastic_cluster)[0]


@pytest.mark.parametrize(
    ("rank", "step", "place"), [(0, 7, "forward"), (2, 1, "commit"), (3, 19, "forward")]
)
def test_a_killed_rank_is_replaced_within_the_cell(
    cluster: Cluster, reference: Any, notes: list[str], rank: int, step: int, place: str
) -> None:
    before = [info.pid for info in cluster.ranks]
    cluster.execute(f"if rank == {rank}: events = [({step}, {place!r}, die)]")
    result = cluster.execute(TRAIN + "; print('trained', rank)", timeout_s=60)
    assert sorted(result.ranks) == [0, 1, 2, 3]
    assert [part.stdout for part in result.ranks.values()] == [
        f"trained {r}\n" for r in range(4)
    ]
    after = [info.pid for info in cluster.ranks]
    assert [r for r in range(4) if after[r] != before[r]] == [rank]
    assert f"rank {rank} (pid {before[rank]}" in notes[0]
    assert "SIGKILL" in notes[0]
    assert_trained(cluster, reference)


@pytest.mark.parametrize("rank", [0, 2])
def test_what_happens_to_the_ranks_is_marked(cluster: Cluster, rank: int) -> None:
    cluster.collector.clear()
    cluster.execute(f"if rank == {rank}: events = [(7, 'forward', die)]")
    cluster.execute(TRAIN, timeout_s=60)
    cluster.scale(3, drop=True)
    marks = cluster.collector.marks
    kinds = [kind for kind, _ in itertools.groupby(mark.kind for mark in marks)]
    after = ["lost", "replaced", "commit", "resized"]
    # The last commits of a rank 0 that is killed may be in its buffer.
    assert kinds in ([["commit", *after]] if rank else [["commit", *after], after])
    lost, replaced = (m for m in marks if m.kind in ("lost", "replaced"))
    assert lost.ranks == replaced.ranks == (rank,)
    assert lost.text.endswith("has died with SIGKILL")
    last = [mark.text for mark in marks if mark.kind == "commit"][-1]
    assert last == f"commit {cluster['state.commits'][0]}"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_replaced_logs_at_the_steps_of_the_others(
    cluster: Cluster, rank: int
) -> None:
    cluster.collector.clear()
    cluster.execute(
        "alone = step_of\n"
        "def step_of(state, ddp, indices):\n"
        "    nbdist.log(committed=state.step)\n"
        "    return alone(state, ddp, indices)"
    )
    cluster.execute("nbdist.log(committed=0, step=1000)")
    cluster.execute(f"if rank == {rank}: events = [(7, 'forward', die)]")
    cluster.execute(TRAIN, timeout_s=60)

    def ends() -> list[tuple[float, float]]:
        series = cluster.collector.history("committed").values()
        return [(steps[-1], values[-1]) for steps, values in series]

    # The step in which the rank died is logged twice on the others.
    expected = [(1000.0 + STEPS + 1, STEPS - 1.0)] * 4
    wait_until(lambda: ends() == expected, HANG_S, lambda: str(ends()))


def test_a_rank_whose_cuda_context_has_failed_is_replaced(
    cluster: Cluster, reference: Any, notes: list[str]
) -> None:
    before = [info.pid for info in cluster.ranks]
    cluster.execute("if rank == 1: events = [(5, 'forward', lose_context)]")
    cluster.execute(TRAIN, timeout_s=60)
    after = [info.pid for info in cluster.ranks]
    assert [r for r in range(4) if after[r] != before[r]] == [1]
    assert "its CUDA context on CPU has failed (CUDA error: an illegal" in notes[0]
    assert_trained(cluster, reference)


def test_an_error_of_a_failed_cuda_context_says_what_to_do(cluster: Cluster) -> None:
    before = [info.pid for info in cluster.ranks]
    with pytest.raises(
        CellError, match=r"rank 2 of 4.*illegal memory access"
    ) as failed:
        cluster.execute("kept = rank\nif rank == 2: lose_context()")
    text = "\n".join(failed.value.rendered)
    assert "The CUDA context of rank 2 on CPU has failed" in text
    assert "%dist_restart -r 2" in text
    with pytest.raises(CellError, match="illegal memory access"):
        cluster["torch.cuda.current_stream().query() if rank == 2 else True"]
    assert cluster["kept"] == [0, 1, 2, 3]  # its host memory can be pulled
    cluster.replace([2])
    after = [info.pid for info in cluster.ranks]
    assert [r for r in range(4) if after[r] != before[r]] == [2]


def test_the_world_is_resized_while_the_cell_runs(
    cluster: Cluster, reference: Any
) -> None:
    """4 ranks, then 2, then 6, by `scale` from another thread."""
    cluster.execute(
        """
def wait():
    with open(folder + "/asked", "w"):
        pass
    while not nbdist.training.elastic.coordinator.coordinator().resize_wanted:
        time.sleep(0.001)

def wait_again():
    wait()

if rank == 0:
    events = [(5, "forward", wait), (13, "forward", wait_again)]
"""
    )
    asked = Path(cluster["folder"][0]) / "asked"
    done: list[str] = []

    def resize() -> None:
        for size in (2, 6):
            wait_until(asked.exists, 60)
            asked.unlink()
            # The ranks' notice of the run may arrive after it has begun.
            wait_until(lambda: cluster._elastic.is_running, 60)
            done.append(cluster.scale(size, drop=True))

    other = threading.Thread(target=resize)
    other.start()
    result = cluster.execute(TRAIN + "; print(sizes)", timeout_s=60)
    other.join(10)
    assert [note.partition(" now")[0] for note in done] == [
        "the world has 2 ranks", "the world has 6 ranks",
    ]  # fmt: skip
    assert cluster.size == len(result.ranks) == 6
    assert result[0].stdout == "[4, 2, 6]\n"
    assert cluster["state.commits"] == [STEPS + 1] * 6  # the first is before step 0
    assert_trained(cluster, reference)


def test_an_error_of_user_code_ends_the_cell_with_that_error(cluster: Cluster) -> None:
    cluster.execute(
        """
def fail():
    raise ValueError("no such sample")

if rank == 1:
    events = [(4, "forward", fail)]
"""
    )
    with pytest.raises(CellError, match=r"^rank 1 of 4 .*ValueError: no such sample"):
        cluster.execute(TRAIN, timeout_s=30)
    cluster.execute("state.restore(); assert state.step == 4")
    assert [info.rank for info in cluster.ranks] == [0, 1, 2, 3]


def test_the_restarts_are_limited_and_the_last_commit_stays(cluster: Cluster) -> None:
    cluster.execute("train = nbdist.elastic.run(max_restarts=0)(steps)")
    cluster.execute("if rank == 3: events = [(6, 'forward', die)]")
    with pytest.raises(
        CellError, match=r"max_restarts=0 are used up: rank 3 "
    ) as caught:
        cluster.execute(TRAIN, timeout_s=60)
    assert "The last commit, number 7, is intact" in str(caught.value)
    assert "rank 3 was replaced" in str(caught.value)  # as after any other cell
    cluster.execute("state.restore(); assert state.step == 6", ranks=[0, 1, 2])


def test_commits_that_race_a_kill_are_never_mixed(tmp_path: Path) -> None:
    """Five deaths at random moments of commits, until one rank is left."""
    cell = """
import os, random, signal, threading

@nbdist.elastic.run(max_restarts=5)
def count(state):
    assert state.parts.eq(state.step).all(), (state.parts, state.step)
    numbers = nbdist.all_gather_object((state.commits, state.step))
    assert len(set(numbers)) == 1, numbers
    assert state.commits == state.step + 1, numbers
    last = nbdist.size() - 1
    victim = (state.step * 7919) % nbdist.size()
    if last and nbdist.rank() == victim:
        threading.Timer(
            random.uniform(0.0, 0.05), os.kill, (os.getpid(), signal.SIGKILL)
        ).start()
    while state.step < 20_000_000:
        state.step += 1
        state.parts += 1
        state.commit()
        if not last and state.step % 100 == 0:
            return state.step
"""
    notes: list[str] = []
    with Cluster(n=6, device="cpu", threads=1, on_failure="shrink") as cluster:
        cluster.on_note = notes.append
        cluster.execute(cell)
        cluster.execute(
            "state = nbdist.elastic.State(step=0, parts=torch.zeros(100_000))\n"
            "print(count(state))",
            timeout_s=60,
        )
        assert cluster.size == 1
        assert cluster["state.parts.eq(state.step).all().item()"] == [True]
    assert len(notes) == 5


def test_a_request_from_another_thread_does_not_end_the_run(
    cluster: Cluster, reference: Any
) -> None:
    """The request comes from another thread, and waits for its ranks while one dies."""
    cluster.execute("if rank == 1: events = [(9, 'forward', die)]")
    over = threading.Event()
    refused: list[UsageError] = []

    def look() -> None:
        while not over.is_set():
            state = cluster.status().get(0)
            if state is None or state["what"] is None:
                continue  # it has not begun
            try:
                cluster.pull("rank", [0])
            except UsageError as error:  # busy, as it should be
                refused.append(error)

    other = threading.Thread(target=look)
    other.start()
    try:
        cluster.execute(TRAIN, timeout_s=60)
    finally:
        over.set()
        other.join()
    assert refused
    assert_trained(cluster, reference)
