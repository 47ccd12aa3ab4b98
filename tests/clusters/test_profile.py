"""The profile of a cell: operations, waits, and one trace of all ranks."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nbdist import CellError, CellInterrupted, Cluster, UsageError
from nbdist.clusters.observer import Event, Quiet
from nbdist.clusters.profile import Profile, checked_path
from nbdist.errors import ClusterError
from nbdist.wire import RankProfile

DEADLINE_S = 60.0
SETUP = """
import os, time
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(slow=None):
    if rank == slow:
        time.sleep(0.05)
    model(torch.ones(4, 8)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
"""
LINE = "In[3] line 9"
"""Where a step calls its all-reduce."""


@pytest.fixture
def ready(cluster: Cluster) -> Cluster:
    cluster.execute(SETUP, number=3)
    return cluster


@pytest.fixture(scope="module")
def mortal() -> Iterator[Cluster]:
    """Three ranks; those that a test kills are replaced."""
    with Cluster(3, device="cpu") as running:
        running.execute(SETUP, setup=True, number=3)
        yield running


def saved(profile: Profile, path: Path) -> list[dict[str, Any]]:
    profile.save(path)
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


BUSY_US = 50_000
"""How long a process of a busy machine may wait for a core between two clocks."""


def of_rank(events: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    return [each for each in events if each["pid"] == rank * 1000]


@pytest.mark.parametrize("slow", [0, 2, 3])
def test_the_slow_rank_and_the_line_are_named(ready: Cluster, slow: int):
    with ready.profiling(3) as profile:
        result = ready.execute(f"for _ in range(6): step({slow})", number=4)
    printed = [line for each in result for line in each.stderr.splitlines()]
    # torch's CUDA build of 2.14 prints this without a driver.
    assert [line for line in printed if "gpuGetDeviceCount failed" not in line] == []
    assert profile.summary.startswith("rank 0-3: 3 optimizer steps in")
    wait = profile.waits[0]
    assert (wait.operation, wait.location) == ("all_reduce", LINE)
    assert wait.calls >= 2  # the line of a call in which no rank waits is not known
    assert max(wait.caused, key=lambda rank: wait.caused[rank]) == slow
    assert wait.seconds > 2 * 3 * 0.04
    said = repr(profile)
    assert f"all_reduce  {LINE}" in said
    assert f"rank {slow} (" in said
    assert "Optimizer.step#SGD.step" in said
    assert "rank 3" in profile._repr_html_()


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_trace_has_all_ranks_and_joins_their_collectives(
    ready: Cluster, tmp_path: Path, name: str
):
    with ready.profiling() as profile:
        ready.execute("for _ in range(3): step(1)", number=4)
    events = saved(profile, tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    for rank in range(4):
        own = of_rank(events, rank)
        (title,) = (each for each in own if each["name"] == "process_name")
        assert title["args"] == {"name": f"rank {rank}"}
        calls = [each for each in own if each["tid"] == "collectives"]
        calls = [each for each in calls if each["ph"] == "X"]
        assert {each["args"]["at"] for each in calls} <= {LINE, ""}
        assert [each["name"] for each in calls] == [
            "all_reduce(sum, float32, (8, 8))"
        ] * 3
        # The two clocks agree: torch's event has nbdist's call in it.
        outer = [each for each in own if each["name"] == "c10d::allreduce_"]
        for call, around in zip(calls, outer, strict=True):
            assert call["ts"] - around["ts"] > -BUSY_US
            if torch.__version__ >= "2.8":  # before, the event ends before the wait
                assert call["ts"] + call["dur"] < around["ts"] + around["dur"] + BUSY_US
    arrows = [each for each in events if each["name"] == "last"]
    begins = [each for each in arrows if each["ph"] == "s"]
    assert len(begins) == 3
    assert {each["pid"] for each in begins[1:]} == {1000}
    for begin in begins:
        ends = [e for e in arrows if e["ph"] == "f" and e["id"] == begin["id"]]
        assert len({each["pid"] for each in (begin, *ends)}) == 4


def test_only_the_next_cell_is_profiled_and_only_on_the_chosen_ranks(ready: Cluster):
    with ready.profiling(2, ranks=[0, 3]) as profile:
        ready.execute("step()", number=4)
        ready.execute("step(); step()", number=5)
    assert list(profile.ranks) == [0, 3]
    assert [each.steps for each in profile.ranks.values()] == [1, 1]
    assert profile.waits == []  # the other ranks' calls are not known
    with ready.profiling() as profile:
        ready.execute("x = torch.ones(3) + 1", ranks=[1], number=6)
    assert list(profile.ranks) == [1]
    assert profile.missing == [0, 2, 3]
    ready.execute("step()")
    with ready.profiling() as profile:
        pass
    assert profile.summary.startswith("rank 0-3 has no profile: it has died, has not")
    with pytest.raises(ClusterError, match="rank 0-3 has no profile"):
        profile.save(Path("trace.json"))


def test_a_profiler_of_the_users_own_is_left_alone(ready: Cluster):
    ready.execute("own = torch.profiler.profile(); own.start()", ranks=[1])
    with ready.profiling() as profile:
        ready.execute("step()", number=4)
    assert profile.missing == [1]
    ready.execute("own.stop(); assert own.key_averages()", ranks=[1])


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_failed_cell_has_a_profile(ready: Cluster, rank: int):
    with (
        pytest.raises(CellError, match=f"rank {rank} of 4 .*ValueError"),
        ready.profiling() as profile,
    ):
        ready.execute(
            f"step()\nif rank == {rank}: raise ValueError\nstep()",
            number=4,
            timeout_s=DEADLINE_S,
        )
    assert list(profile.ranks) == [0, 1, 2, 3]
    assert profile.waits[0].calls == 1


class Press(Quiet):
    """Presses the interrupt button when the first rank prints."""

    has_pressed = False

    def take(self, event: Event) -> None:
        if event.output is not None and not self.has_pressed:
            self.has_pressed = True
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_cell_has_a_profile(ready: Cluster):
    code = "step()\nif rank: nbdist.barrier()\nprint('here')\ntime.sleep(60)"
    with pytest.raises(CellInterrupted), ready.profiling() as profile:
        ready.execute(code, observer=Press())
    assert list(profile.ranks) == [0, 1, 2, 3]
    ready.execute("step()")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_ranks_that_outlive_another_have_a_profile(mortal: Cluster, rank: int):
    with pytest.raises(CellError), mortal.profiling() as profile:
        mortal.execute(
            f"step()\nif rank == {rank}: os._exit(7)\nstep()", timeout_s=DEADLINE_S
        )
    assert profile.missing == [rank]
    assert f"; rank {rank} has no profile: it has died," in profile.summary
    mortal.execute("step()", timeout_s=DEADLINE_S)


def test_bad_requests_are_refused_before_anything_is_sent(
    ready: Cluster, tmp_path: Path
):
    for wrong in ({"steps": 0}, {"ranks": [4]}, {"ranks": []}):
        with pytest.raises(UsageError), ready.profiling(**wrong):
            pytest.fail("it has begun")
    with pytest.raises(UsageError, match=r"expected a \.json or \.json\.gz file"):
        checked_path(str(tmp_path / "trace.txt"))
    with pytest.raises(UsageError, match="does not exist"):
        checked_path(str(tmp_path / "none" / "trace.json"))


def test_a_copied_profile_has_the_times_of_this_host() -> None:
    there = RankProfile("there", 1, 0, 1000, 3000, 500, 0, ())
    here = there.copied("here", 200)
    assert (here.path, here.begun_ns, here.ended_ns) == ("here", 1300, 3300)
    for profile in (there, here):  # since the epoch, nothing has changed
        assert profile.begun_ns + profile.clock_offset_ns == 1500
    assert here.covers(3300)
    assert not here.covers(1299)
