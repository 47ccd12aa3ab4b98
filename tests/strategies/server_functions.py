"""Functions that tests/strategies/test_servers.py runs on ranks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from digits_training import (
    EPOCHS,
    accuracy,
    flat,
    make_model,
    sgd,
    train_alone,
    train_with,
)
from mpi4py import MPI
from replica_functions import adam, plain, start
from torch import nn

import nbdist
from nbdist.collectives.tolerant_messages import Doorbell
from nbdist.errors import UsageError
from nbdist.training.strategies import Mirrored, ParameterServer
from nbdist.training.strategies.parameter_server import message_bodies

Found = dict[str, Any]
LONGEST_SLEEP_S = 0.05
"""The longest sleep, in seconds, of a rank that waits for messages."""


def run_all_functions() -> Found:
    """Run all functions in one world of three workers and a server, or two and two."""
    group = start()
    return {
        "sync sgd": distance(ParameterServer(), sgd),
        "sync adam": distance(ParameterServer(), adam),
        "sync, 2 servers": distance(ParameterServer(n_ps=2), sgd),
        "async, sent": sent(),
        "accuracies": accuracies(),
        "staleness": scripted(group.rank),
        "bound": bounded(group.rank),
        "backup": backup(group.rank),
        "idle": idle(group.rank),
        "failure": failure(group.rank),
        "schedule": scheduled(),
        "reduce": reductions(group.rank),
        "memory": optimizer_state(),
    }


def distance(strategy: ParameterServer, make: Callable[[Any], Any]) -> float:
    """The largest difference of a parameter from a training in one process."""
    model, _ = train_with(strategy, 2, make)
    return float((flat(model) - flat(train_alone(2, make))).abs().max())


def sent() -> tuple[float, list[bool]]:
    """Train where the ranks share no memory, so that gradients are sent.

    Returns:
        The accuracy, and whether gradients are sent: with this strategy, and with one
        that was set up without the patch.
    """
    strategy = ParameterServer(mode="async", n_ps=2)
    with patch.object(message_bodies, "share", lambda *_: None):
        model, _ = train_with(strategy, 2 * EPOCHS, plain)
    shared = ParameterServer()
    shared.setup(model, plain(model.parameters()))
    sends = [
        bool(each._bodies.sent(each._bodies.gradients(0, 0)))
        for each in (strategy, shared)
    ]
    return accuracy(model), sends


def accuracies() -> dict[str, float]:
    epochs = 2 * EPOCHS
    found = {"alone": accuracy(train_alone(epochs, plain))}
    for name, strategy in {
        "Mirrored": Mirrored(),
        "sync": ParameterServer(),
        "sync, 2 of 3": ParameterServer(replicas=2),
        "async": ParameterServer(mode="async"),
        "async, bounded": ParameterServer(n_ps=2, mode="async", max_staleness=2),
    }.items():
        # If gradients are dropped, more steps use as many samples.
        used = strategy.replicas / 3 if getattr(strategy, "replicas", None) else 1
        model, _ = train_with(strategy, round(epochs / used), plain)
        found[name] = accuracy(model)
    return found


class Turns:
    """Lets workers act one at a time, in the order of a script."""

    def __init__(self, script: list[int]) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        self._script = script

    def play(self, act: Callable[[], None]) -> None:
        """Act at each turn of this rank in the script."""
        token, rank = bytearray(1), self._comm.rank
        for place, who in enumerate(self._script):
            if who != rank:
                continue
            if place and self._script[place - 1] != rank:
                self._comm.Recv(token, self._script[place - 1])
            act()
            after = self._script[place + 1] if place + 1 < len(self._script) else rank
            if after != rank:
                self._comm.Send(token, after)


def one_step(model: nn.Module, optimizer: Any) -> Callable[[], None]:
    def act() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()

    return act


SCRIPT = [0, 0, 1, 2, 0, 1, 1, 2, 2, 2, 0, 2, 1]


def scripted(rank: int) -> dict[int, int]:
    """The histogram of the staleness of pushes in the order of the script."""
    strategy, turns = ParameterServer(mode="async"), Turns(SCRIPT)
    model = make_model()
    act = one_step(*strategy.setup(model, plain(model.parameters())))
    strategy.run(lambda: turns.play(act))
    return dict(strategy.staleness)


def shared_counts() -> Any:
    """An int64 array in memory that all ranks share, with an element for each rank."""
    own = tempfile.mktemp() if MPI.COMM_WORLD.rank == 0 else None
    path = MPI.COMM_WORLD.bcast(own)
    if own:
        Path(own).write_bytes(bytes(64))
    MPI.COMM_WORLD.Barrier()
    return np.memmap(path, np.int64, "r+")


def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not after {within_s} s"
        time.sleep(0.001)


def bounded(rank: int, bound: int = 2) -> Any:
    """Hold worker 0 until the others are blocked, and count their steps ahead of it."""
    strategy, counts = (
        ParameterServer(mode="async", max_staleness=bound),
        shared_counts(),
    )
    model = make_model()
    act = one_step(*strategy.setup(model, plain(model.parameters())))

    def train() -> list[int]:
        seen = []
        for _step in range(6):
            if rank == 0:
                done = int(counts[0])
                until(lambda done=done: min(counts[1:3]) >= min(done + bound, 6))
                time.sleep(0.05)  # without the bound, they would continue now
                seen.append(int(max(counts[1:3])) - done)
            act()
            counts[rank] += 1
        return seen

    return strategy.run(train), strategy.reports[0].lead


def backup(rank: int) -> tuple[int, int, dict[int, int]]:
    """Update with 2 of 3 gradients, so that the last gradient is dropped."""
    strategy, counts = ParameterServer(replicas=2), shared_counts()
    model = make_model()
    act = one_step(*strategy.setup(model, plain(model.parameters())))

    def train() -> None:
        if rank == 2:
            until(lambda: min(counts[:2]) == 3)
            act()
            return
        for _step in range(3):
            act()
            counts[rank] += 1
        until(lambda: counts[2] == 1)

    def late() -> None:
        train()
        counts[rank] += rank == 2

    strategy.run(late)
    (report,) = strategy.reports
    return report.updates, report.dropped, dict(report.staleness)


def idle(rank: int, naps: int = 3) -> list[float]:
    """Hold the workers until the server has slept for the longest time `naps` times.

    Returns:
        The seconds of each of the server's sleeps, from the last message on.
    """
    strategy, counts = ParameterServer(), shared_counts()
    model = make_model()
    strategy.setup(model, plain(model.parameters()))
    server = MPI.COMM_WORLD.size - 1
    sleeps: list[float] = []
    sleep = Doorbell.wait

    def counted(bell: Doorbell, seconds: float) -> bool:
        rung = sleep(bell, seconds)
        if rank == server and counts[server] < naps:
            sleeps[:] = [] if rung else [*sleeps, seconds]
            counts[server] = sum(each == LONGEST_SLEEP_S for each in sleeps)
        return rung

    with patch.object(Doorbell, "wait", counted):
        strategy.run(lambda: until(lambda: counts[server] == naps))
    return sleeps


def failure(rank: int) -> Any:
    """Raise on one worker. The other workers and the next run continue."""
    outcomes = []
    for mode in ("sync", "async"):
        strategy = ParameterServer(mode=mode)
        model = make_model()
        act = one_step(*strategy.setup(model, plain(model.parameters())))

        def train(act: Any = act) -> str:
            for step in range(5):
                if rank == 1 and step == 2:
                    raise ArithmeticError("worker 1 cannot")
                act()
            return f"done by {rank}"

        try:
            outcomes.append(strategy.run(train))
        except ArithmeticError as error:
            outcomes.append(str(error))
        outcomes.append(strategy.run(lambda act=act: act() or "again"))
        outcomes.append(strategy.reports[0].updates)
    return outcomes


def scheduled() -> float:
    """Train with a worker's scheduler; return the distance to one process."""
    strategy = ParameterServer(n_ps=2)
    model, alone = make_model(), make_model()
    _, optimizer = strategy.setup(model, plain(model.parameters()))

    def train(net: nn.Module, opt: Any) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
        for _step in range(3):
            one_step(net, opt)()
            schedule.step()

    strategy.run(train, (model, optimizer))
    train(alone, plain(alone.parameters()))
    return float((flat(model) - flat(alone)).abs().max())


def reductions(rank: int) -> Any:
    strategy = ParameterServer()
    model = make_model()
    strategy.setup(model, plain(model.parameters()))
    inside = strategy.run(lambda: strategy.reduce("sum", {"a": rank, "b": [1.0]}))
    outside = strategy.reduce("mean", torch.tensor([float(rank)]))
    return inside, outside.tolist(), strategy.local_results(rank)


def optimizer_state() -> int:
    """The number of parameters with optimizer state on this rank, of 4 on 2 servers."""
    strategy = ParameterServer(n_ps=2)
    model = make_model()
    _, optimizer = strategy.setup(model, sgd(model.parameters()))
    strategy.run(one_step(model, optimizer))
    return len(optimizer.state)


def refusals() -> list[str]:
    """The messages that wrong arguments get, on two ranks."""
    start()
    model = nn.Linear(2, 2)

    def set_up(**options: Any) -> Any:
        return ParameterServer(**options).setup(model, plain(model.parameters()))

    bad = [
        lambda: ParameterServer(mode="fast"),
        lambda: ParameterServer(max_staleness=1),
        lambda: ParameterServer(mode="async", max_staleness=-1),
        lambda: ParameterServer(mode="async", replicas=2),
        lambda: set_up(n_ps=2),
        lambda: set_up(replicas=3),
        lambda: ParameterServer().run(print),
        lambda: set_up()[1].step(),
    ]
    messages = []
    for attempt in bad:
        try:
            attempt()
        except UsageError as error:
            messages.append(str(error))
    nbdist.barrier()
    return messages
