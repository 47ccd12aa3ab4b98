"""Every fault on every rank, at every place of a training step.

Each cell must end in time and name the right rank, and the next cell must work.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from _pytest.mark.structures import ParameterSet

from nbdist import Cluster, NbdistError
from nbdist.clusters.observer import Event, Quiet
from tests.processes import Footprint, wait_until
from tests.reliability.matrix import CASES, Case
from tests.reliability.report import Report

SETUP = Path(__file__).with_name("faulty_step.py").read_text()
KEEP = "kept = (rank, torch.arange(3) + rank, os.getpid())"


class SharedRanks:
    """Three ranks with the training step, which are started again after a failure."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    def ready(self) -> Cluster:
        if self._cluster is None:
            self._cluster = Cluster(3, device="cpu", threads=1).start()
            self._cluster.execute(SETUP, setup=True)
            # The first step is slow.
            self._cluster.execute("step('nowhere', 'none', 0)")
        return self._cluster

    def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            footprint = Footprint(info.pid for info in cluster.ranks)
            cluster.stop()
            footprint.assert_gone()


@pytest.fixture(scope="module")
def shared_ranks() -> Iterator[SharedRanks]:
    shared_ranks = SharedRanks()
    yield shared_ranks
    shared_ranks.close()


@pytest.fixture
def cluster(
    shared_ranks: SharedRanks, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    failed = request.session.testsfailed
    yield shared_ranks.ready()
    if request.session.testsfailed > failed:
        shared_ranks.close()


class Interrupter(Quiet):
    """Interrupts the cell when `prints` ranks have printed and `ready` returns true."""

    def __init__(self, prints: int, ready: Callable[[], bool]) -> None:
        self._left, self._ready = prints, ready
        self.at = 0.0
        self.ended = 0.0
        """The time when the last rank had answered or died."""

    def take(self, event: Event) -> None:
        if event.output is None:
            self.ended = time.monotonic()
        elif event.output["msg_type"] == "stream":
            self._left -= 1
            if self._left == 0:
                threading.Thread(target=self._interrupt).start()

    def _interrupt(self) -> None:
        wait_until(self._ready)
        self.at = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)


def _marked(case: Case) -> ParameterSet:
    """Mark most cases of the first and the last rank as slow."""
    often = case.which == "middle" or case.place == "in an all-reduce"
    return pytest.param(case, marks=() if often else pytest.mark.slow, id=str(case))


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_a_fault_ends_its_cell_and_names_the_rank(
    cluster: Cluster, case: Case, report: Report
):
    cluster.execute(KEEP)
    before = [info.pid for info in cluster.ranks]
    interrupter = Interrupter(
        case.prints, lambda: _has_happened(case, before[case.rank])
    )
    start = time.monotonic()
    with pytest.raises(NbdistError) as ended:
        _inject(cluster, case, interrupter, before[case.rank])
    seconds = _ended(case, interrupter) - (interrupter.at or start)
    said = str(ended.value) + "\n".join(getattr(ended.value, "rendered", ()))
    assert re.search(case.says, said), said
    _repair(cluster, case)
    _assert_usable(cluster, case, before)
    report.add(case, seconds, ended.value)


def _inject(cluster: Cluster, case: Case, interrupter: Interrupter, pid: int) -> None:
    """Inject the fault, in a cell or between cells. The cell must raise."""
    if case.place != "between cells":
        call = f"step({case.place!r}, {case.fault.name!r}, {case.rank})"
        cluster.execute(call, observer=interrupter)
    elif case.fault.dies:
        later = f"threading.Timer(0.05, inject, ({case.fault.name!r}, rank)).start()"
        cluster.execute(later, ranks=[case.rank])
        wait_until(lambda: case.rank in cluster.died())
        raise cluster.died()[case.rank]
    elif case.fault.name == "SIGSTOP":
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(0.5, interrupter._interrupt)
        timer.start()
        cluster.execute("dist.barrier()")
    else:
        code = f"inject({case.fault.name!r}, rank)"
        cluster.execute(code, ranks=[case.rank], observer=interrupter)


def _has_happened(case: Case, pid: int) -> bool:
    if case.fault.name != "SIGSTOP":
        return True
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def _ended(case: Case, interrupter: Interrupter) -> float:
    """The time when the cell had ended, without the recovery after it."""
    stays = case.fault.name == "SIGSTOP" or interrupter.ended == 0.0
    return time.monotonic() if stays else interrupter.ended


def _repair(cluster: Cluster, case: Case) -> None:
    if case.fault.name == "SIGSTOP":
        cluster.replace([case.rank])


def _assert_usable(cluster: Cluster, case: Case, before: list[int]) -> None:
    cluster.execute("t = torch.full((3,), rank + 1.0)\nnbdist.all_reduce(t)")
    assert [t.tolist() for t in cluster["t"]] == [[6.0] * 3] * 3
    cluster.execute("t = torch.full((3,), rank + 1.0)\ndist.all_reduce(t)")
    assert [t.tolist() for t in cluster["t"]] == [[6.0] * 3] * 3
    after = [info.pid for info in cluster.ranks]
    lost = [case.rank] if case.fault.dies or case.fault.name == "SIGSTOP" else []
    assert [rank for rank in range(3) if after[rank] != before[rank]] == lost
    for rank, (number, tensor, pid) in enumerate(cluster["kept"]):
        if rank not in lost:
            assert (number, tensor.tolist(), pid) == (
                rank, [rank, rank + 1, rank + 2], before[rank],
            )  # fmt: skip
    running = {info.pid for info in cluster.ranks}
    assert all(psutil.pid_exists(pid) for pid in running)
    for rank in lost:
        with contextlib.suppress(psutil.NoSuchProcess):
            gone = psutil.Process(before[rank])
            assert gone.status() == psutil.STATUS_ZOMBIE
