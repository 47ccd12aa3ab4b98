"""What holds a rank's memory is named, also while the rank is busy."""

from __future__ import annotations

import os
import signal

import pytest

from nbdist import CellError, Cluster
from nbdist.wire import HeldTensor, MemoryReport
from tests.clusters.test_looking import running
from tests.processes import stop

MIB = 1 << 20


def reports(cluster: Cluster, count: int = 10) -> dict[int, MemoryReport]:
    """The report of each rank, all of which must answer."""
    found = cluster.memory(count)
    assert None not in found.values()
    return {rank: report for rank, report in found.items() if report is not None}


def named(report: MemoryReport) -> dict[str, HeldTensor]:
    return {held.name: held for held in report.largest}


def test_tensors_are_named_and_the_largest_come_first(cluster: Cluster) -> None:
    cluster.execute(
        "layers = torch.nn.Sequential(torch.nn.Linear(1000, 3000, bias=False))\n"
        "adam = torch.optim.Adam(layers.parameters())\n"
        "layers(torch.ones(1, 1000)).sum().backward()\n"
        "adam.step()\n"
        "history = {'grads': [torch.zeros(5_000_000 + rank)]}\n"
        "part = history['grads'][0][:7]"
    )
    for rank, report in reports(cluster).items():
        first, found = report.largest[0], named(report)
        assert first.name == "history['grads'][0]"
        assert first.size == 4 * (5_000_000 + rank)
        assert (first.shape, first.dtype) == ((5_000_000 + rank,), "float32")
        assert found["layers.0.weight"].kind == "Parameter"
        assert found["layers.0.weight.grad"].size == 12_000_000
        assert "adam.state[layers.0.weight]['exp_avg']" in found
        assert "part" not in found, "a view holds no memory of its own"
        sizes = [held.size for held in report.largest]
        assert sizes == sorted(sizes, reverse=True)
        assert report.totals["cpu"] >= sum(sizes)
        assert report.counts["cpu"] >= 6


def test_the_count_limits_the_tensors_and_not_the_totals(cluster: Cluster) -> None:
    cluster.execute(f"tensors = [torch.zeros({MIB // 4}) for _ in range(8)]")
    for report in reports(cluster, 3).values():
        assert len(report.largest) == 3
        assert report.totals["cpu"] >= 8 * MIB


def test_local_variables_of_a_running_function_are_named(cluster: Cluster) -> None:
    code = (
        "import time\n"
        "def train():\n"
        "    batch = torch.zeros(6_000_000)\n"
        "    while True:\n"
        "        time.sleep(0.01)\n"
        "train()"
    )
    with running(cluster, code.replace("    while", "    print(1)\n    while"), [0, 1]):
        found = reports(cluster)
    assert "train(): batch" in named(found[0])
    assert "train(): batch" not in named(found[3])


def test_what_a_traceback_keeps_is_named_until_the_next_cell(cluster: Cluster) -> None:
    with pytest.raises(CellError):
        cluster.execute(
            "def fail():\n"
            "    kept = torch.zeros(6_000_000)\n"
            "    raise ValueError\n"
            "fail()"
        )
    name = "fail(): kept of the last error's traceback"
    assert all(name in named(report) for report in reports(cluster).values())
    cluster.execute("pass")
    assert not any(name in named(report) for report in reports(cluster).values())


def test_a_report_keeps_nothing_alive(cluster: Cluster) -> None:
    cluster.execute(
        "import threading, time, weakref\n"
        "seen = threading.Event()\n"
        "def work():\n"
        "    scratch = torch.zeros(6_000_000)\n"
        "    reference = weakref.ref(scratch)\n"
        "    while not seen.is_set():\n"
        "        time.sleep(0.01)\n"
        "    del scratch\n"
        "    return reference() is None"
    )
    future = cluster.execute("freed = work()", wait=False)
    try:
        while not all(
            "work(): scratch" in named(report) for report in reports(cluster).values()
        ):
            assert not future.done()
    finally:
        # The control thread evaluates this while the cell runs.
        cluster.look("seen.set()")
    future.result(30)
    assert cluster["freed"] == [True] * 4


def test_objects_of_the_user_run_no_code(cluster: Cluster) -> None:
    cluster.execute(
        "calls = []\n"
        "class Odd(dict):\n"
        "    def items(self): calls.append('items'); return super().items()\n"
        "    def __iter__(self): calls.append('iter'); return super().__iter__()\n"
        "    def __getattribute__(self, name):\n"
        "        calls.append(name)\n"
        "        return super().__getattribute__(name)\n"
        "odd = Odd(weights=torch.zeros(6_000_000))\n"
        "calls.clear()"
    )
    found = reports(cluster)
    assert all("odd['weights']" in named(report) for report in found.values())
    assert cluster["calls"] == [[]] * 4


def test_objects_that_are_not_as_they_should_be_are_passed_over(
    cluster: Cluster,
) -> None:
    cluster.execute(
        "broken = torch.nn.Linear(2, 2)\n"
        "broken.__dict__['_parameters'] = None\n"
        "unmade = torch.optim.Optimizer.__new__(torch.optim.SGD)\n"
        "odd = torch.optim.SGD([torch.ones(1, requires_grad=True)])\n"
        "odd.param_groups.append('junk')\n"
        "huge = {10**5000: torch.zeros(2_000_000), 'near': torch.zeros(3_000_000)}\n"
        "nested = torch.nested.nested_tensor([torch.ones(9), torch.ones(4_000_000)])"
    )
    for report in reports(cluster).values():
        found = named(report)
        assert {"nested", "huge['near']", "huge[int]"} <= found.keys()
        assert found["nested"].size >= 16_000_000


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_stopped_rank_does_not_delay_the_others(cluster: Cluster, rank: int) -> None:
    pid = cluster.ranks[rank].pid
    stop(pid)
    try:
        found = cluster.memory()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [r for r, report in found.items() if report is None] == [rank]


def test_reports_while_tensors_come_and_go_describe_what_there_is(
    cluster: Cluster,
) -> None:
    code = (
        "print(1)\n"
        "while True:\n"
        "    some = [torch.zeros(50_000) for _ in range(200)]\n"
        "    other = {i: t for i, t in enumerate(some)}"
    )
    with running(cluster, code, [0, 1, 2, 3]):
        for _ in range(6):
            for report in reports(cluster).values():
                assert all(held.size > 0 for held in report.largest)
