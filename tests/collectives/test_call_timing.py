"""The bandwidth of collectives, as the monitor shows it."""

from __future__ import annotations

import time

import pytest

from nbdist import Cluster
from nbdist.collectives.call_timing import GpuTimer, _Timed, bus_bytes
from nbdist.wire import DeviceSample
from tests.processes import wait_until


@pytest.mark.parametrize(
    ("operation", "size", "ranks", "carried"),
    [
        ("all_reduce", 400, 4, 600.0),
        ("all_gather", 100, 4, 300.0),
        ("reduce_scatter", 100, 4, 300.0),
        ("broadcast", 400, 4, 400.0),
        ("barrier", 0, 4, None),
        ("all_reduce", 400, 1, None),
    ],
)
def test_a_link_carries_what_nccls_tests_count(
    operation: str, size: int, ranks: int, carried: float | None
) -> None:
    assert bus_bytes(operation, size, ranks) == carried


class FailedEvent:
    def query(self) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_a_gpu_that_has_failed_has_no_times() -> None:
    timer, event = GpuTimer(), FailedEvent()
    timer._pending.append(_Timed(0, event, event, 1.0))  # type: ignore[arg-type]
    assert timer.fastest() == 0.0
    assert timer.share() == 0.0


MEASURED = """
import time, torch
large = torch.ones(2**20)

def seconds():
    begun = time.perf_counter()
    nbdist.all_reduce(large)
    return time.perf_counter() - begun

print(min(seconds() for _ in range(30)))
"""


def test_the_monitor_has_the_bandwidth_of_large_calls(cluster: Cluster) -> None:
    begun = time.time()
    result = cluster.execute(MEASURED)
    ended = time.time()
    fastest = {each.rank: float(each.stdout) for each in result}

    def samples(after: float) -> list[DeviceSample]:
        devices = cluster.collector.snapshot().devices.values()
        return [each for some in devices for each in some if each.time > after]

    wait_until(lambda: {each.rank for each in samples(ended)} == set(fastest))
    best: dict[int, float] = dict.fromkeys(fastest, 0.0)
    for each in samples(begun):
        best[each.rank] = max(best[each.rank], each.bus_bandwidth or 0.0)
    for rank, seconds in fastest.items():
        # The record has less of a call than the cell, which sees Python's part too.
        assert 1.5 * 2**22 / seconds <= best[rank] < 1e12
