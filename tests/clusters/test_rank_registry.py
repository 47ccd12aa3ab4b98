"""The first process that has ended is named as the cause of a rank's death."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.clusters import rank_registry
from nbdist.clusters.rank_registry import ExitMonitor, ExitOrder, RankRegistry
from nbdist.clusters.startup_status import ends_within
from nbdist.clusters.supervisor_client import Loss
from nbdist.errors import RankDied
from nbdist.ipc.resources import few_descriptors
from nbdist.wire import RankInfo
from tests.processes import HANG_S
from tests.rank_info import rank_info

PARENT = """
import os, signal
from nbdist.ipc.prctl import die_with_parent
child = os.fork()
if child == 0:
    die_with_parent()
    print(os.getpid(), flush=True)
signal.pause()
"""
"""Prints the pid of its child, which ends with it."""

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="needs Linux's process descriptors"
)


class Family:
    """A process and its child, which ends with it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.child = int(self._process.stdout.readline())
        self.parent = self._process.pid

    def kill(self) -> None:
        """Kill the parent, and return when both have ended."""
        with self._process:
            if self._process.poll() is not None:
                return
            child = os.pidfd_open(self.child)
            self._process.kill()
        assert select.select([child], [], [], HANG_S)[0]
        os.close(child)


@pytest.fixture
def families() -> Iterator[list[Family]]:
    made = [Family() for _ in range(3)]
    yield made
    for family in made:
        family.kill()


def test_the_order_in_which_processes_end_is_known(families: list[Family]) -> None:
    first, second, third = families
    order = ExitOrder()
    order.watch(pid for each in families for pid in (each.child, each.parent))
    assert order.ended_before(second.parent) == set()
    second.kill()
    assert order.ended_before(second.parent) == set()
    assert order.ended_before(second.child) == {second.parent}
    third.kill()
    for _ in range(2):
        assert order.ended_before(third.parent) == {second.parent, second.child}
        assert order.ended_before(first.parent) == set()
    order.close()
    order.close()
    assert order.ended_before(third.parent) == {second.parent, second.child}


def test_a_process_that_is_not_watched_keeps_no_descriptor(
    families: list[Family],
) -> None:
    order = ExitOrder()
    order.watch([families[0].parent, families[1].parent])
    before = len(os.listdir("/proc/self/fd"))
    order.watch([families[1].parent, families[2].parent])
    assert len(os.listdir("/proc/self/fd")) == before
    order.close()
    assert len(os.listdir("/proc/self/fd")) == before - 3


def test_a_death_is_noticed_without_a_free_descriptor(
    families: list[Family],
) -> None:
    died: queue.SimpleQueue[int] = queue.SimpleQueue()
    ranks = [_info(rank, family) for rank, family in enumerate(families)]
    monitor = ExitMonitor(ranks[:1], died.put)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        assert f"of the {taken[0] + 1} files" in few_descriptors()
        monitor.watch(ranks[1:])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    for family in families:
        family.kill()
    assert {died.get(timeout=HANG_S) for _ in range(2)} == {1, 2}
    monitor.close()
    assert died.empty()
    assert few_descriptors() == ""


class _NoMonitor:
    """A monitor that notices no death."""

    def __init__(self, *_: object) -> None:
        pass

    def watch(self, _infos: object) -> None:
        pass

    def close(self) -> None:
        pass


Failed = list[tuple[str, RankDied]]


@pytest.fixture
def failed() -> Failed:
    """The engines whose requests were failed, each with the error."""
    return []


@pytest.fixture
def registry(
    families: list[Family],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failed: Failed,
) -> Iterator[RankRegistry]:
    """Two ranks of an mpiexec, which is the first family. No death is noticed."""
    monkeypatch.setattr(rank_registry, "ExitMonitor", _NoMonitor)
    mpiexec, *ranks = families
    started: Any = SimpleNamespace(
        client=SimpleNamespace(fail=lambda uuid, error: failed.append((uuid, error))),
        process_supervisor=SimpleNamespace(run_dir=tmp_path, pids=[mpiexec.parent]),
        infos=[_info(rank, family) for rank, family in enumerate(ranks)],
        hosts=None,
    )
    made = RankRegistry(started)
    yield made
    made.close()


def test_a_wait_for_deaths_ends_with_the_death(
    families: list[Family], registry: RankRegistry
) -> None:
    found: list[bool] = []

    def wait() -> None:
        found.append(registry.await_deaths(lambda died: 1 in died, 10 * HANG_S))

    waiting = threading.Thread(target=wait)
    waiting.start()
    families[2].kill()
    registry._on_death(1)
    waiting.join(HANG_S)
    assert found == [True]
    assert not registry.await_deaths(lambda died: 0 in died, 0.0)


def test_a_death_ends_the_requests_and_wakes_those_that_wait(
    families: list[Family], registry: RankRegistry, failed: Failed
) -> None:
    class Told(threading.Condition):
        count = 0

        def notify_all(self) -> None:
            assert registry._died.keys() == {1}
            self.count += 1
            super().notify_all()

    told = registry._lock = Told()
    families[2].kill()
    registry._on_death(1)
    assert told.count == 1
    assert failed == [(registry[1].engine_uuid, registry.died[1])]


def test_a_selection_of_dead_ranks_says_which_ranks_live(
    families: list[Family], registry: RankRegistry
) -> None:
    others = "runs on the others, which keep their variables"
    families[2].kill()
    registry._on_death(1)
    with pytest.raises(RankDied, match=rf"rank 1 .* has died.*\. -r 0 {others}; %dist"):
        registry.select(None)
    families[1].kill()
    registry._on_death(0)
    with pytest.raises(
        RankDied, match=r"rank 0 .*; rank 1 .*\. %dist_stop and"
    ) as none:
        registry.select(None)
    assert others not in str(none.value)


def test_a_wait_for_a_process_that_is_not_a_child_ends_with_it(
    families: list[Family],
) -> None:
    child = families[0].child
    assert not ends_within(child, 0.0)
    killer = threading.Thread(target=families[0].kill)
    killer.start()
    assert ends_within(child, HANG_S)
    killer.join()
    assert ends_within(child, 0.0)


def test_a_parent_that_ends_late_still_reports(
    families: list[Family], registry: RankRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_registry, "STOPPED_TIMEOUT_S", 0.01)
    late = threading.Timer(0.3, families[1].kill)
    late.start()
    registry._on_death(0)
    late.join()
    assert "because its parent process has ended too" in str(registry.died[0])


def test_a_stopped_parent_is_not_waited_for(
    families: list[Family], registry: RankRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_registry, "ENDING_TIMEOUT_S", 60.0)
    os.kill(families[1].parent, signal.SIGSTOP)
    registry._on_death(0)
    assert "its parent process does not answer" in str(registry.died[0])


REASON = "mpiexec has ended with SIGABRT"


def test_ranks_that_end_before_mpiexec_have_their_own_exit(
    families: list[Family], registry: RankRegistry
) -> None:
    mpiexec, *ranks = families
    ranks[1].kill()
    mpiexec.kill()
    ranks[0].kill()
    registry.lose(Loss(REASON, True, mpiexec.parent, aborted=True))
    assert str(registry.died[0]) == REASON
    assert f"rank 1 (pid {ranks[1].child} on here) has died" in str(registry.died[1])


def test_ranks_that_end_after_mpiexec_name_mpiexec(
    families: list[Family], registry: RankRegistry
) -> None:
    """Also if their ends are noticed before that of mpiexec."""
    mpiexec, *ranks = families
    ranks[1].kill()
    registry._on_death(1)
    mpiexec.kill()
    ranks[0].kill()
    registry._on_death(0)
    assert list(registry.died) == [1]
    registry.lose(Loss(REASON, True, mpiexec.parent, aborted=True))
    assert str(registry.died[0]) == REASON
    assert f"rank 1 (pid {ranks[1].child} on here) has died" in str(registry.died[1])


def test_ranks_name_a_killed_mpiexec_whichever_ended_first(
    families: list[Family], registry: RankRegistry
) -> None:
    mpiexec, *ranks = families
    for family in (*ranks, mpiexec):
        family.kill()
    for rank in (0, 1):
        registry._on_death(rank)
    registry.lose(Loss("mpiexec has ended with SIGKILL", True, mpiexec.parent))
    assert {str(error) for error in registry.died.values()} == {
        "mpiexec has ended with SIGKILL"
    }


def _info(rank: int, family: Family) -> RankInfo:
    pids = {"pid": family.child, "parent_pid": family.parent}
    return rank_info(rank, host="here", name=f"rank{rank}", **pids)
