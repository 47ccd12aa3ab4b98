"""An elastic training under random kills ends as an undisturbed one does."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbdist import Cluster
from tests.chaos.killer import Killer
from tests.clusters import elastic_training
from tests.clusters.elastic_training import SAMPLES, STEPS, weights
from tests.processes import wait_until

RANKS = 3
MINUTES = 5
SEEDS = (1, 2, 3)
MOST_S = 8.0
"""Seconds between two kills of the long runs, the recovery included."""
FEW = 3
"""The number of kills of the short run."""
STOP_S = 300.0
"""Seconds in which a training must end after it was told to."""

TRAINING = """

def log(word, state):
    if nbdist.rank() == 0:
        with open({folder!r} + "/log", "a") as file:
            file.write(f"{{word}} {{state.step}}\\n")

@nbdist.elastic.run(max_restarts=10_000)
def train_long(state):
    log("begin", state)
    ddp = DDP(state.model)
    while not state.over:
        for indices in state.sampler:
            step_of(state, ddp, indices)
            state.commit()
            log("commit", state)
            time.sleep({pause_s})
        assert sorted(state.seen) == list(range(240))
        state.seen = []
        state.sampler.end_epoch()
        enough = state.sampler.epoch == {epochs}
        over = enough or os.path.exists({folder!r} + "/over")
        flag = torch.tensor([float(over)])
        nbdist.broadcast(flag, 0)
        state.over = bool(flag.item())
        state.commit()
"""
RUN = "state = make_state(over=False)\ntrain_long(state)"


def prepare(cluster: Cluster, folder: Path, *, pause_s: float, epochs: int) -> None:
    """Define the training on all ranks, and on those that replace them."""
    code = TRAINING.format(folder=str(folder), pause_s=pause_s, epochs=epochs)
    cluster.execute(elastic_training.SETUP + code, setup=True)


def undisturbed(folder: Path, epochs: int) -> Any:
    """The weights after `epochs` epochs without kills."""
    folder.mkdir()
    with Cluster(RANKS, device="cpu", threads=1) as cluster:
        prepare(cluster, folder, pause_s=0.0, epochs=epochs)
        cluster.execute(RUN)
        return weights(cluster)[0]


def most_lost(log: Path) -> int:
    """The most committed steps that a restart has lost."""
    committed = lost = 0
    for line in log.read_text().splitlines():
        word, _, number = line.partition(" ")
        if word == "commit" and number:
            committed = int(number)
        elif word == "begin" and number:
            lost = max(lost, committed - int(number))
    return lost


def test_the_steps_that_a_restart_loses_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("begin 0\ncommit 1\ncommit 2\nbegin 2\ncommit 3\nbegin 1\ncom")
    assert most_lost(log) == 2


class _Ending:
    """Tells a training to end, on another thread.

    Args:
        killer: the killer, which is closed first.
        folder: the folder in which the training looks for the file that ends it.
        done: whether there were enough kills.
        most_s: the most seconds in which processes are killed.
    """

    def __init__(
        self, killer: Killer, folder: Path, done: Callable[[], bool], most_s: float
    ) -> None:
        self._killer, self._folder = killer, folder
        self._done, self._most_s = done, most_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._killer.start()
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(AssertionError):  # the time for kills is up
            wait_until(lambda: self._over.is_set() or self._done(), self._most_s)
        self._killer.close()
        (self._folder / "over").touch()
        if not self._over.wait(STOP_S):
            os.kill(os.getpid(), signal.SIGINT)


def _assert_survives(
    cluster: Cluster, notes: list[str], folder: Path, ending: _Ending
) -> None:
    """Run the training until it is told to end, and compare."""
    try:
        with ending:
            cluster.execute(RUN)
    finally:
        print(*notes, sep="\n")  # shown where the test fails
    size = cluster.size  # less, where a rank could not be replaced in two tries
    epochs = set(cluster["state.sampler.epoch"])
    assert len(epochs) == 1, epochs
    epoch = epochs.pop()
    assert cluster["state.step"] == [epoch * STEPS] * size
    assert cluster["state.sampler.length"] == [SAMPLES] * size
    assert most_lost(folder / "log") <= 1, notes
    reference = undisturbed(folder / "undisturbed", epoch)
    for weight in weights(cluster):
        assert (weight - reference).abs().max() < 1e-5


@pytest.mark.timeout(400)
def test_a_training_survives_some_kills(tmp_path: Path) -> None:
    notes: list[str] = []
    with Cluster(RANKS, device="cpu", threads=1) as cluster:
        cluster.on_note = notes.append
        prepare(cluster, tmp_path, pause_s=0.01, epochs=10_000)
        kinds = ("one rank", "all ranks", "a rank's parent")
        killer = Killer(cluster, notes, 7, 1.0, kinds)
        ending = _Ending(killer, tmp_path, lambda: len(killer.kills) >= FEW, 120.0)
        _assert_survives(cluster, notes, tmp_path, ending)


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_training_survives_minutes_of_kills(seed: int, tmp_path: Path) -> None:
    seed = int(os.environ.get("NBDIST_CHAOS_SEED") or seed)
    notes: list[str] = []
    with Cluster(RANKS, device="cpu", threads=1) as cluster:
        cluster.on_note = notes.append
        prepare(cluster, tmp_path, pause_s=0.01, epochs=1_000_000)
        killer = Killer(cluster, notes, seed, MOST_S)
        print(
            f"NBDIST_CHAOS_SEED={seed} pytest tests/chaos/test_random_kills.py -m slow"
        )
        ending = _Ending(killer, tmp_path, lambda: False, 60.0 * MINUTES)
        _assert_survives(cluster, notes, tmp_path, ending)
        print(f"{len(killer.kills)} kills: {killer.kills}")
