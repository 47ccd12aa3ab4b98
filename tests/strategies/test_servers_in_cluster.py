"""ParameterServer on ranks that are killed and interrupted."""

from __future__ import annotations

import itertools
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import CellError, Cluster
from nbdist.clusters.observer import Event, Quiet
from tests.processes import wait_until

WORKERS, SERVER = 3, 3
STEPS, KILLED_AT = 30, 12
DEADLINE_S = 60

SETUP = """
import copy, os, signal
from torch import nn


def set_up(**options):
    strategy = nbdist.strategies.ParameterServer(snapshot_every=4, **options)
    model = nn.Linear(8, 4)
    model, optimizer = strategy.setup(model, sgd(model))
    return strategy, model, optimizer, copy.deepcopy(model)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def step_once(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()


def train(steps, at=None, killer=None, pid=None):
    for step in range(steps):
        if step == at and rank == killer:
            os.kill(pid or os.getpid(), signal.SIGKILL)
        step_once(model, optimizer)
    return steps


def distance_to_one_process(steps):
    alone = copy.deepcopy(first)
    its_own = sgd(alone)
    for _ in range(steps):
        step_once(alone, its_own)
    pairs = zip(model.parameters(), alone.parameters())
    return max((one - other).abs().max().item() for one, other in pairs)
"""
NEW = "strategy, model, optimizer, first = set_up(mode={mode!r}); finished = None"
AGAIN = f"finished = strategy.run(train, ({STEPS},))"
UPDATES = "[report.updates for report in strategy.reports]"
FLAT = "[p.detach().double().sum().item() for p in model.parameters()]"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Four ranks; those that a test kills are replaced."""
    with Cluster(4, device="cpu") as running:
        running.execute(SETUP, setup=True)
        yield running


def updates(cluster: Cluster) -> int:
    """The number of updates, which must be equal on all ranks."""
    every: list[int] = cluster["strategy.reports[0].updates"]
    assert every == [every[0]] * 4
    return every[0]


def assert_trains_again(cluster: Cluster, mode: str, before: range) -> None:
    """Run once more on all ranks, continuing after a number of updates."""
    cluster.execute(f"finished = None\n{AGAIN}", timeout_s=DEADLINE_S)
    assert cluster["finished"] == [STEPS] * 4
    after = updates(cluster)
    assert after - STEPS * (1 if mode == "sync" else WORKERS) in before
    assert cluster[FLAT] == [cluster[FLAT][0]] * 4
    if mode == "sync" and len(before) == 1:  # the momentum is unchanged, too
        assert max(cluster[f"distance_to_one_process({after})"]) < 1e-5


def test_each_worker_records_the_staleness_of_its_gradients(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Rank 2 pulls the parameters first, and pushes when the others have ended."""
    cluster.execute(NEW.format(mode="async"))
    cluster.push(folder=str(tmp_path))
    slowly = """
from pathlib import Path


def await_files(*names):
    end = time.monotonic() + 30
    while not all(Path(folder, name).exists() for name in names):
        assert time.monotonic() < end, names
        time.sleep(0.001)


def train_in_turns():
    if rank != 2:
        await_files("begun")
        train(6)
        Path(folder, f"ended{rank}").touch()
        return
    step_once(model, optimizer)
    Path(folder, "begun").touch()
    await_files("ended0", "ended1")
    step_once(model, optimizer)


strategy.run(train_in_turns)
"""
    cluster.execute(f"import time\n{slowly}", timeout_s=DEADLINE_S)

    def recorded() -> dict[int, list[float]]:
        series = cluster.collector.history("staleness").items()
        return {rank: list(values) for rank, (_, values) in series}

    wait_until(lambda: sum(map(len, recorded().values())) == 14, DEADLINE_S)
    of_worker = recorded()
    assert of_worker.keys() == {0, 1, 2}
    assert of_worker[2] == [0, 12]
    assert max(of_worker[0] + of_worker[1]) < 12
    counted = cluster["dict(strategy.staleness)"][SERVER]
    assert counted == Counter(itertools.chain(*of_worker.values()))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_worker_does_not_stop_the_others(cluster: Cluster, mode: str) -> None:
    cluster.execute(NEW.format(mode=mode))
    dying = f"finished = strategy.run(train, ({STEPS}, {KILLED_AT}, 1))"
    with pytest.raises(CellError, match=r"rank 1 \(pid \d+ .* died with SIGKILL"):
        cluster.execute(dying, timeout_s=DEADLINE_S)
    survivors = [0, 2, SERVER]
    finished = cluster["finished"]
    assert [finished[rank] for rank in survivors] == [STEPS] * 3
    before = cluster["strategy.reports[0].updates"][0]
    assert before == (STEPS if mode == "sync" else 2 * STEPS + KILLED_AT)
    assert_trains_again(cluster, mode, range(before, before + 1))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_server_releases_the_workers_and_leaves_a_snapshot(
    cluster: Cluster, mode: str
) -> None:
    cluster.execute(NEW.format(mode=mode))
    dying = f"""
victim = nbdist.all_gather_object(os.getpid())[{SERVER}]
strategy.run(train, ({STEPS}, {KILLED_AT}, 0, victim))
"""
    with pytest.raises(CellError) as caught:
        cluster.execute(dying, timeout_s=DEADLINE_S)
    said = str(caught.value) + "\n".join(caught.value.rendered)
    assert f"rank {SERVER} (pid" in said
    # Who sees it first says it: MPI, or what supervises the ranks.
    assert re.search(f"released from parameter server {SERVER}: .*rank {SERVER}", said)
    # Snapshots are of updates 1, 5, 9, ...; asynchronous ones may be lost on their way.
    newest = range(9, 10) if mode == "sync" else range(1, 2 * STEPS + KILLED_AT + 1)
    assert_trains_again(cluster, mode, newest)


TWO_SERVERS = "strategy, model, optimizer, first = set_up(n_ps=2); finished = None"
FIRST, MIDDLE, LAST = 0, KILLED_AT, STEPS - 1
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("victim", "step"),
    [
        (victim, step)
        if (victim, step) in ((1, MIDDLE), (2, MIDDLE))
        else pytest.param(victim, step, marks=slow)
        for victim in range(4)
        for step in (FIRST, MIDDLE, LAST)
    ],
)
def test_with_two_servers_any_rank_can_die_at_any_step(
    cluster: Cluster, victim: int, step: int
) -> None:
    """Workers are 0 and 1. The lowest living worker kills a server or itself."""
    cluster.execute(TWO_SERVERS)
    killer = victim if victim < 2 else 0
    dying = f"""
victim = nbdist.all_gather_object(os.getpid())[{victim}]
finished = strategy.run(train, ({STEPS}, {step}, {killer}, victim))
"""
    with pytest.raises(CellError, match=rf"rank {victim} \(pid \d+ .* SIGKILL"):
        cluster.execute(dying, timeout_s=DEADLINE_S)
    if victim < 2:  # the other worker, and the servers, get to the end
        others = [rank for rank in range(4) if rank != victim]
        assert [cluster["finished"][rank] for rank in others] == [STEPS] * 3
        counts = [cluster[UPDATES][rank] for rank in others]
        assert counts == [[STEPS, STEPS]] * 3
    cluster.execute(f"finished = None\n{AGAIN}", timeout_s=DEADLINE_S)
    assert cluster["finished"] == [STEPS] * 4
    counts = cluster[UPDATES]
    assert counts == [counts[0]] * 4
    for server, count in enumerate(counts[0], start=2):
        if victim < 2:
            assert count == 2 * STEPS
        elif server == victim:  # from a snapshot, of update 1, 5, 9, ...; or none
            assert count - STEPS in range(0, step + 1)
        else:
            assert count - STEPS in range(step, step + 2)
    assert cluster[FLAT] == [cluster[FLAT][0]] * 4


PRESSED_IN_STEP = f"""
class Pressed(torch.optim.SGD):
    steps = 0

    def step(self):
        self.steps += 1
        if self.steps == {KILLED_AT}:
            os.kill(os.getpid(), signal.SIGINT)
        super().step()


plain = sgd
if rank == {SERVER}:
    sgd = lambda model: Pressed(model.parameters(), lr=0.01, momentum=0.9)
strategy, model, optimizer, first = set_up()
sgd, finished = plain, None
"""


def test_an_update_that_is_interrupted_is_complete_and_counted(
    cluster: Cluster,
) -> None:
    cluster.execute(PRESSED_IN_STEP)
    with pytest.raises(CellError, match="KeyboardInterrupt"):
        cluster.execute(AGAIN, timeout_s=DEADLINE_S)
    assert_trains_again(cluster, "sync", range(KILLED_AT, KILLED_AT + 1))


class Press(Quiet):
    """Interrupts the cell at its first line of text."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._has_pressed = False

    def take(self, event: Event) -> None:
        if event.output is not None and not self._has_pressed:
            self._has_pressed = True
            threading.Thread(target=self._cluster.interrupt).start()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_interrupt_ends_a_run_on_all_ranks(cluster: Cluster, mode: str) -> None:
    cluster.execute(NEW.format(mode=mode))
    endless = "strategy.run(lambda: [train(20)] and print('on') or train(10**9))"
    with pytest.raises(CellError) as caught:
        cluster.execute(endless, observer=Press(cluster), timeout_s=DEADLINE_S)
    said = str(caught.value)
    first, *others = said.splitlines()
    assert "KeyboardInterrupt" in first
    # The server may hear of an interrupted worker before its own interrupt arrives.
    heard = r"CollectiveAborted: no worker has finished: rank \d has failed"
    assert all(re.search(f"KeyboardInterrupt|{heard}", o) for o in others), others
    assert "has died" not in said
    assert_trains_again(cluster, mode, range(19, 10**9))
