"""The ways of training that are compared, on a rank: each takes a few steps in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import nbdist
import nbdist.horovod as hvd
from benchmarks.scaling import ALONE, PEER, STEPS

__all__ = ["MODELS", "Problem", "Way", "all_ways"]

CLASSES = 10


@dataclass(frozen=True)
class Problem:
    """A model, and the samples of one rank in a step."""

    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    """The shape of one."""
    batch: int

    def batch_of_noise(self) -> tuple[Tensor, Tensor]:
        labels = torch.randint(CLASSES, (self.batch,))
        return torch.randn(self.batch, *self.sample), labels


def convolutions() -> nn.Module:
    """Much arithmetic for each parameter."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip


def perceptron() -> nn.Module:
    """Many parameters, each used once for a sample."""
    width = 2048
    return nn.Sequential(
        nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES),
    )  # fmt: skip


MODELS = {
    "compute-bound": Problem(convolutions, (3, 32, 32), batch=32),
    "communication-bound": Problem(perceptron, (2048,), batch=8),
}


@dataclass(frozen=True)
class Way:
    """A way to train that is measured."""

    turn: Callable[[], float]
    """Takes `STEPS` steps; the seconds on this rank."""
    samples: int
    """Of all ranks that train, in a turn."""


def all_ways(problem: Problem, gloo: Any) -> dict[str, Way]:
    """By name, what trains a problem. Every rank must call.

    Args:
        gloo: a process group over all ranks.
    """
    ranks = nbdist.size()
    ways = {
        ALONE: _way(problem, lambda model, optimizer: (model, optimizer)),
        PEER: _way(problem, lambda *own: _ddp(*own, gloo)),
        "DDP over nbdist": _way(problem, lambda *own: _ddp(*own, None)),
        "hvd.DistributedOptimizer": _way(problem, _horovod),
    }
    chosen = nbdist.strategies
    strategies = {
        "Mirrored": chosen.Mirrored(),
        "CentralStorage": chosen.CentralStorage(),
        f"LocalSGD(every={STEPS})": chosen.LocalSGD(every=STEPS),
    }
    server = getattr(chosen, "ParameterServer", None)
    if server is not None and ranks > 1:
        strategies["ParameterServer, sync"] = server(mode="sync")
        strategies["ParameterServer, async"] = server(mode="async")
    if server is not None and ranks > 2:
        strategies["ParameterServer(2), sync"] = server(n_ps=2, mode="sync")
        strategies["ParameterServer(2), async"] = server(n_ps=2, mode="async")
    for name, strategy in strategies.items():
        ways[name] = _way(problem, strategy.setup, strategy)
    return ways


def _way(
    problem: Problem,
    setup: Callable[[nn.Module, Optimizer], tuple[nn.Module, Optimizer]],
    strategy: Any = None,
) -> Way:
    torch.manual_seed(0)
    model = problem.make()
    model, optimizer = setup(model, SGD(model.parameters(), lr=1e-3))
    inputs, labels = problem.batch_of_noise()

    def steps() -> float:
        begun = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return time.perf_counter() - begun

    replicas = strategy.num_replicas if strategy else nbdist.size()
    # Timed inside of `run`: what a parameter server does once, at its begin and end,
    # is no part of a step.
    turn = (lambda: strategy.run(steps)) if strategy else steps
    return Way(turn, replicas * problem.batch * STEPS)


def _ddp(
    model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup | None
) -> tuple[nn.Module, Optimizer]:
    return DistributedDataParallel(model, process_group=group), optimizer


def _horovod(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    hvd.init()
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())
