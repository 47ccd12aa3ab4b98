"""The monitor in the kernel: its messages, their rate, and its end."""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import traitlets

from nbdist.telemetry.collector import Collector
from nbdist.widgets.display import latest_values
from nbdist.widgets.monitor import Monitor
from nbdist.wire import Batch, DeviceSample, Sample, StepProgress, TimeSplit
from tests.rank_info import rank_info

Sent = tuple[dict[str, Any], bytes]


class SpyMonitor(Monitor):
    """Keeps the messages to the browser."""

    def __init__(self, collector: Collector) -> None:
        self.sent: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        super().__init__(collector)

    def send(self, content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        assert buffers is not None
        self.sent.put((content, buffers[0]))

    def hear(self, kind: str) -> None:
        """Deliver a message of a front end."""
        self._handle_custom_msg({"kind": kind}, [])

    def next(self) -> Sent:
        return self.sent.get(timeout=10)


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def monitor(collector: Collector) -> Iterator[SpyMonitor]:
    made = SpyMonitor(collector)
    made.next()  # the first one, of everything there was
    made.hear("acknowledge")
    yield made
    made.close()


def loss(sequence: int, *values: float, rank: int = 0) -> Batch:
    first = 10 * sequence
    return Batch(rank, "source", sequence, 0, tuple(
        Sample(rank, first + i, 1000.0 + i, {"loss": value})
        for i, value in enumerate(values)
    ))  # fmt: skip


def numbers(buffer: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(buffer) // 8}d", buffer))


def test_a_change_is_sent_as_numbers(monitor: SpyMonitor, collector: Collector) -> None:
    collector.receive(loss(0, 3.0, 2.0))
    content, buffer = monitor.next()
    assert content["series"] == [["loss", 0, 1, 0, 2, False]]
    assert not content["full"]
    latest, steps, times, *values = [
        numbers(buffer)[:3], *(numbers(buffer)[3 + 2 * i :][:2] for i in range(5))
    ]  # fmt: skip
    assert latest == [1.0, 1001.0, 2.0]
    assert steps == [0.0, 1.0]
    assert times == [1000.0, 1001.0]
    assert values == [[3.0, 2.0]] * 3

    monitor.hear("acknowledge")
    collector.receive(loss(1, 1.0))
    content, _ = monitor.next()
    assert content["series"] == [["loss", 0, 1, 1, 2, False]]


def test_messages_are_numbered_without_a_gap(
    monitor: SpyMonitor, collector: Collector
) -> None:
    numbers = []
    for i in range(4):
        collector.receive(loss(i, 1.0))
        numbers.append(monitor.next()[0]["sequence"])
        monitor.hear("acknowledge")
    assert numbers == [1, 2, 3, 4]


def test_a_front_end_that_asks_gets_the_whole_history(
    monitor: SpyMonitor, collector: Collector
) -> None:
    collector.receive(loss(0, 3.0, 2.0))
    monitor.next()
    monitor.hear("everything")
    content, _ = monitor.next()
    assert content["full"]
    assert content["series"] == [["loss", 0, 1, 0, 2, False]]


def test_a_message_has_ranks_devices_and_losses(
    monitor: SpyMonitor, collector: Collector
) -> None:
    split = TimeSplit(0.5, 0.25, 0.15, 0.1, "it sleeps", "In[1] line 2", 0.5)
    sample = DeviceSample(
        0, 1.0, "cuda:0", None, 10, 20, 99.0, 7, allocated=3, reserved=5,
        temperature=60.0, power=300.0, disk=1e6, network=2e6, bus_bandwidth=3e9,
        split=split,
    )  # fmt: skip
    info = rank_info(0, 1, host="node", device="cuda:0", device_name="H200")
    collector.set_ranks([info])
    monitor.next()
    collector.receive(Batch(0, "source", 4, 0, (sample,)))
    content, _ = monitor.next()
    assert content["ranks"] == [[0, "node", "cuda:0", "H200"]]
    assert content["devices"] == [{
        "rank": 0, "device": "cuda:0", "utilisation": [None],
        "used": 10, "total": 20, "allocated": 3, "reserved": 5, "temperature": 60.0,
        "power": 300.0, "cpu": 99.0, "resident": 7, "disk": 1e6, "network": 2e6,
        "bandwidth": 3e9, "split": (0.5, 0.25, 0.15, 0.1),
    }]  # fmt: skip
    assert content["slow"] == ""
    assert content["lost"] == [[0, 4]]
    assert content["marks"] is None


def test_the_steps_and_the_metrics_of_nbdist_are_sent(
    monitor: SpyMonitor, collector: Collector
) -> None:
    shares = Sample(0, 7, 1000.0, {"time/compute": 1.0}, is_internal=True)
    collector.receive(Batch(0, "source", 0, 0, (shares,), step=7))
    content, _ = monitor.next()
    assert content["steps"] == [[0, 7]]
    assert content["series"] == [["time/compute", 0, 1, 0, 1, True]]


def test_marks_are_sent_when_they_change(
    monitor: SpyMonitor, collector: Collector
) -> None:
    collector.mark("lost", "the cluster was stopped", [0, 1])
    content, _ = monitor.next()
    (mark,) = content["marks"]
    assert mark["kind"] == "lost"
    assert mark["text"] == "rank 0-1: the cluster was stopped"
    assert mark["time"] == collector.marks[0].time


def test_the_progress_is_sent(monitor: SpyMonitor, collector: Collector) -> None:
    collector.set_ranks([rank_info(0), rank_info(1)])
    assert monitor.next()[0]["eta"] is None
    now = time.time()
    for i, ago_s in enumerate([10.0, 0.0]):
        for rank in (0, 1):
            progress = StepProgress(now - ago_s, 10 * i * (rank + 1), 60, "steps")
            collector.receive(Batch(rank, "source", i, 0, (), progress))
    monitor.hear("everything")
    while (content := monitor.next()[0])["eta"]["done"] < 10:
        monitor.hear("acknowledge")
    assert content["eta"] == {
        "unit": "steps", "done": 10, "total": 60, "rate": 1.0,
        "left_s": pytest.approx(50.0),
    }  # fmt: skip
    collector.receive(loss(0, 1.0, rank=5))
    last = repr(latest_values(collector)).splitlines()[-1]
    assert last == "10 of 60 steps, 1 steps/s, 50.0 s left"


def test_many_changes_are_sent_ten_times_a_second(
    monitor: SpyMonitor, collector: Collector
) -> None:
    done = threading.Event()
    timer = threading.Timer(1.0, done.set)
    timer.start()
    sequence = 0
    while not done.is_set():
        collector.receive(loss(sequence, 1.0))
        sequence += 1
    timer.join()
    monitor.close()
    assert sequence > 100
    assert 3 <= monitor.sent.qsize() <= 13


def test_close_ends_the_thread_and_the_subscription(collector: Collector) -> None:
    made = SpyMonitor(collector)
    closed: list[str] = []
    made.on_close(lambda: closed.append("x"))
    made.next()
    made.close()
    made.close()
    assert closed == ["x"]
    assert not made._thread.is_alive()
    collector.receive(loss(0, 1.0))
    assert made.sent.empty()


def test_invalid_choices_are_refused(collector: Collector) -> None:
    with pytest.raises(traitlets.TraitError, match="epoch"):
        Monitor(collector, x="epoch")
