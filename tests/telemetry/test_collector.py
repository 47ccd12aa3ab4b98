"""The collector counts missing batches and returns what has changed."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from nbdist.telemetry.collector import MARKS_OF_A_KIND, MAX_METRICS, Collector
from nbdist.wire import Batch, DeviceSample, Mark, RankInfo, Sample
from tests.guarded import guarded
from tests.processes import HANG_S
from tests.rank_info import rank_info


def batch(
    rank: int = 0,
    sequence: int = 0,
    steps: range = range(1),
    source: str = "first",
    dropped: int = 0,
    **scalars: float,
) -> Batch:
    records = tuple(
        Sample(rank, s, 1000.0 + s, scalars or {"loss": float(s)}) for s in steps
    )
    return Batch(rank, source, sequence, dropped, records)


def device(rank: int, utilisation: float) -> Batch:
    sample = DeviceSample(rank, utilisation, "cuda:0", utilisation, 1, 2, 5.0, 1)
    return Batch(rank, "device", int(utilisation), 0, (sample,))


def test_a_history_holds_each_ranks_steps_and_values() -> None:
    collector = Collector()
    collector.receive(batch(1, steps=range(3)))
    collector.receive(batch(0, steps=range(2)))
    history = collector.history("loss")
    assert list(history) == [0, 1]
    assert [list(column) for column in history[1]] == [[0, 1, 2], [0, 1, 2]]
    assert collector.history("accuracy") == {}
    assert collector.metrics == ["loss"]


def test_a_long_history_spans_the_run() -> None:
    collector = Collector(capacity=100)
    for sequence in range(100):
        first = 100 * sequence
        collector.receive(batch(0, sequence, range(first, first + 100)))
    steps, values = collector.history("loss")[0]
    assert 50 <= len(steps) <= 100
    assert steps[0] == 0
    assert steps[-1] >= 9800
    assert values[0] == pytest.approx(63.5)
    (delta,) = collector.snapshot().deltas
    assert delta.latest == (9999.0, 10999.0, 9999.0)


def test_a_snapshot_since_another_holds_only_the_change() -> None:
    collector = Collector()
    collector.receive(batch(0, 0, range(5)))
    collector.receive(batch(1, 0, range(5)))
    first = collector.snapshot()
    assert first.full
    assert {delta.rank: delta.start for delta in first.deltas} == {0: 0, 1: 0}

    collector.receive(batch(1, 1, range(5, 7)))
    second = collector.snapshot(first.cursor)
    (delta,) = second.deltas
    assert not second.full
    assert (delta.rank, delta.start, list(delta.steps)) == (1, 4, [4, 5, 6])
    assert collector.snapshot(second.cursor).deltas == []


def test_a_changed_history_is_sent_completely() -> None:
    collector = Collector(capacity=4)
    collector.receive(batch(0, 0, range(4)))
    before = collector.snapshot().cursor
    collector.receive(batch(0, 1, range(4, 5)))
    (coarser,) = collector.snapshot(before).deltas
    assert (coarser.start, coarser.width, list(coarser.steps)) == (0, 2, [0, 2, 4])
    before = collector.snapshot().cursor
    collector.receive(batch(0, 2, range(2, 3)))
    (cut,) = collector.snapshot(before).deltas
    assert (cut.start, list(cut.steps)) == (0, [0, 2])


def test_after_clear_a_snapshot_is_full() -> None:
    collector = Collector()
    collector.receive(batch(0, 0))
    cursor = collector.snapshot().cursor
    collector.clear()
    collector.receive(batch(0, 1, accuracy=1.0))
    snapshot = collector.snapshot(cursor)
    assert snapshot.full
    assert [delta.metric for delta in snapshot.deltas] == ["accuracy"]
    assert snapshot.lost == {}


def world(*names: str) -> list[RankInfo]:
    """Ranks of processes with these names."""
    return [
        rank_info(rank, len(names), engine_uuid=name) for rank, name in enumerate(names)
    ]


def test_many_commits_do_not_displace_the_death_of_a_rank() -> None:
    collector = Collector()
    collector.mark("lost", "rank 2 has died with SIGKILL", [2])
    for number in range(500):
        commit = Mark(2e9 + number, "commit", f"commit {number}")
        collector.receive(Batch(0, "source", number, 0, (commit,)))
    lost, *commits = collector.marks
    assert str(lost) == "rank 2 has died with SIGKILL"
    assert len(commits) == MARKS_OF_A_KIND
    assert commits[-1].text == "commit 499"


def test_ranks_that_report_the_same_event_share_a_mark() -> None:
    collector = Collector()
    text = "step 3: the gradient of fc has NaNs"
    for rank, time in [(3, 10.2), (0, 10.0), (1, 10.4), (1, 12.0)]:
        mark = Mark(time, "nan", text, (rank,))
        collector.receive(Batch(rank, "source", int(time), 0, (mark,)))
    first, second = collector.marks
    assert (first.time, str(first)) == (10.0, f"rank 0-1,3: {text}")
    assert (second.time, str(second)) == (12.0, f"rank 1: {text}")


@pytest.mark.parametrize(
    ("names", "kind", "text", "ranks"),
    [
        ("axc", "replaced", "rank 1 was replaced", (1,)),
        ("ab", "resized", "the world has 2 ranks instead of 3", ()),
        ("b", "resized", "the world has 1 rank instead of 3", ()),
        ("abcd", "resized", "the world has 4 ranks instead of 3", ()),
        ("xyz", "restarted", "all ranks were started again", ()),
    ],
)
def test_a_change_of_members_is_marked(
    names: str, kind: str, text: str, ranks: tuple[int, ...]
) -> None:
    collector = Collector()
    collector.set_ranks(world(*"abc"))
    collector.set_ranks(world(*"abc"))
    assert collector.marks == []
    collector.set_ranks(world(*names))
    (mark,) = collector.marks
    assert (mark.kind, str(mark), mark.ranks) == (kind, text, ranks)


def test_a_snapshot_has_the_marks_only_if_they_have_changed() -> None:
    collector = Collector()
    collector.mark("interrupted", "In[3] was interrupted")
    first = collector.snapshot()
    assert first.marks == collector.marks
    assert collector.snapshot(first.cursor).marks is None
    collector.mark("interrupted", "In[4] timed out")
    second = collector.snapshot(first.cursor)
    assert second.marks is not None
    assert [mark.text for mark in second.marks] == [
        "In[3] was interrupted", "In[4] timed out"
    ]  # fmt: skip
    collector.clear()
    assert collector.snapshot(second.cursor).marks == []


def test_lost_batches_and_dropped_records_are_counted() -> None:
    collector = Collector()
    collector.receive(batch(0, 0))
    collector.receive(batch(0, 3, dropped=10))
    collector.receive(batch(1, 0))
    assert collector.snapshot().lost == {0: 12}


def test_a_repeated_batch_is_ignored_and_a_new_recorder_is_not() -> None:
    collector = Collector()
    collector.receive(batch(0, 0, loss=1.0))
    collector.receive(batch(0, 0, loss=5.0))
    assert list(collector.history("loss")[0][1]) == [1.0]
    collector.receive(batch(0, 0, range(1, 2), source="second", loss=7.0))
    assert list(collector.history("loss")[0][1]) == [1.0, 7.0]
    assert collector.snapshot().lost == {}


def test_devices_keep_their_last_minute_and_leave_with_their_rank() -> None:
    collector = Collector()
    for second in range(100):
        collector.receive(device(0, second))
        collector.receive(device(7, second))
    collector.set_ranks([rank_info(1), rank_info(0)])
    snapshot = collector.snapshot()
    assert [entry.rank for entry in snapshot.ranks] == [0, 1]
    assert list(snapshot.devices) == [0]
    assert [s.utilisation for s in snapshot.devices[0]] == list(range(40, 100))
    assert collector.snapshot(snapshot.cursor).devices == {}


def test_subscribers_are_called_until_they_leave() -> None:
    collector = Collector()
    calls: list[str] = []
    leave = collector.subscribe(lambda: calls.append("x"))
    collector.receive(batch())
    collector.set_ranks([])
    collector.clear()
    leave()
    leave()
    collector.receive(batch(0, 1))
    assert len(calls) == 3


def test_a_subscriber_may_call_back() -> None:
    collector = Collector()
    seen: list[int] = []
    leave = collector.subscribe(lambda: seen.append(len(collector.snapshot().deltas)))
    collector.subscribe(leave)
    collector.receive(batch())
    assert seen == [1]


def test_everything_is_read_and_changed_with_the_lock() -> None:
    collector = Collector()
    for name in ("_subscribers", "_followers", "_metrics", "_devices", "_marks"):
        whole = guarded(getattr(collector, name), lambda: collector._lock)
        setattr(collector, name, whole)
    leave = collector.subscribe(lambda: None)
    _, end = collector.follow(lambda _: None)
    collector.set_ranks([rank_info(0)])
    collector.receive(batch())
    collector.receive(device(0, 1.0))
    collector.mark("commit", "commit 1")
    collector.snapshot(collector.snapshot().cursor)
    assert collector.history("loss").keys() == {0}
    assert collector.metrics == ["loss"]
    assert [mark.text for mark in collector.marks] == ["commit 1"]
    leave()
    end()


def test_endless_metric_names_do_not_fill_the_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    collector = Collector()
    with caplog.at_level(logging.WARNING):
        for i in range(MAX_METRICS + 50):
            collector.receive(batch(0, i, **{f"m{i}": 1.0}))
    assert len(collector.metrics) == MAX_METRICS
    assert caplog.text.count("further ones are not kept") == 1


def test_64_ranks_report_from_threads_while_a_view_reads() -> None:
    """100,000 steps of each rank, at a width that keeps every step."""
    collector = Collector(capacity=64)
    rounds, steps = 4, 100_000 // 50

    def report(rank: int) -> None:
        for sequence in range(rounds):
            # Every 50th step: the memory depends on the steps spanned, not the points.
            first = sequence * steps // rounds
            records = tuple(
                Sample(rank, 50 * s, float(s), {"loss": 1.0})
                for s in range(first, first + steps // rounds)
            )
            collector.receive(Batch(rank, "a", sequence, 0, records))

    threads = [threading.Thread(target=report, args=(rank,)) for rank in range(64)]
    for thread in threads:
        thread.start()
    cursor = None
    while any(thread.is_alive() for thread in threads):
        cursor = collector.snapshot(cursor).cursor
    for thread in threads:
        thread.join(HANG_S)
    snapshot = collector.snapshot()
    assert {delta.rank for delta in snapshot.deltas} == set(range(64))
    assert {len(delta.steps) for delta in snapshot.deltas} <= set(range(32, 65))
    assert {delta.latest[0] for delta in snapshot.deltas} == {50.0 * (steps - 1)}
    assert snapshot.lost == {}


def test_the_collector_imports_neither_torch_nor_mpi() -> None:
    heavy = (
        "{'torch', 'numpy', 'mpi4py', 'ipywidgets', 'anywidget', 'psutil', 'pynvml'}"
    )
    code = (
        "import sys, nbdist.telemetry.collector, nbdist.telemetry.recorder, "
        "nbdist.telemetry.sampler, nbdist.widgets\n"
        f"print(*({heavy} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
