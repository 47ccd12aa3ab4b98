"""Functions that tests/strategies/test_replicas.py runs on ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digits_training import (
    EPOCHS,
    accuracy,
    flat,
    make_model,
    samples,
    sgd,
    train_alone,
)
from digits_training import train_with as train
from mpi4py import MPI
from torch import nn

import nbdist
from nbdist.collectives import Group, set_default_group
from nbdist.collectives.torch_backend.registration import register
from nbdist.errors import UsageError
from nbdist.training.strategies import (
    CentralStorage,
    InputContext,
    LocalSGD,
    Mirrored,
    MultiWorkerMirrored,
    OneDevice,
)

Found = dict[str, Any]


def start() -> Group:
    """Set double precision, and make the default process group."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    world = MPI.COMM_WORLD
    group = Group(world)
    set_default_group(group)
    register()
    place = Path(world.bcast(tempfile.mkdtemp())) / "store"
    dist.init_process_group(
        "nbdist",
        store=dist.FileStore(str(place), world.size),
        rank=world.rank,
        world_size=world.size,
    )
    return group


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def compare(strategy: Any, make: Callable[[Any], Any]) -> Found:
    """The difference from one process on the same batches, and the mean losses."""
    model, losses = train(strategy, 2, make)
    alone = train_alone(2, make)
    found = float((flat(model) - flat(alone)).abs().max())
    return {"distance": found, "losses": strategy.reduce("mean", losses)}


def run_all_functions() -> Found:
    """Run all functions of this file in one world."""
    group = start()
    found: Found = {
        "mirrored sgd": compare(Mirrored(), sgd),
        "mirrored adam": compare(Mirrored(), adam),
        "mirrored ring": compare(Mirrored("ring"), sgd),
        "mirrored devices": compare(Mirrored(devices=["/cpu:0"] * group.size), sgd),
        "multi-worker mirrored": compare(MultiWorkerMirrored("RING"), sgd),
        "one device": compare(OneDevice("/device:CPU:0"), sgd),
        "central sgd": compare(CentralStorage(), sgd),
        "central adam": compare(CentralStorage(root=1), adam),
        "local every 1": compare(LocalSGD(), plain),
        "accuracies": accuracies(),
        "central state": where_the_state_is(),
        "drift": drift(group.rank),
        "reduce": reductions(group.rank),
        "reduce axis": reductions_along_an_axis(group.rank),
        "from function": from_a_function(),
        "shares": shares(),
        "schedule": with_a_schedule(),
    }
    return found


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def accuracies() -> dict[str, float]:
    found = {"alone": accuracy(train_alone(EPOCHS))}
    strategies = {
        "Mirrored": Mirrored(), "CentralStorage": CentralStorage(),
        "LocalSGD": LocalSGD(every=4),
        "LocalSGD with state": LocalSGD(every=4, optimizer_state=True),
    }  # fmt: skip
    for name, strategy in strategies.items():
        model, _ = train(strategy, EPOCHS)
        if isinstance(strategy, LocalSGD):
            strategy.average()
        found[name] = accuracy(model)
    return found


def where_the_state_is() -> int:
    """The number of parameters with optimizer state on this rank."""
    model = make_model()
    strategy = CentralStorage()
    model, optimizer = strategy.setup(model, sgd(model.parameters()))
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return len(optimizer.state)


def drift(rank: int) -> list[bool]:
    """Whether all ranks' models are equal after each of 6 steps on different data."""
    model = make_model()
    strategy = LocalSGD(every=3)
    model, optimizer = strategy.setup(model, sgd(model.parameters()))
    alike = []
    for step in range(6):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        mine = flat(model)
        low, high = strategy.reduce("min", mine), strategy.reduce("max", mine)
        alike.append(bool(torch.equal(low, high)))
    return alike


def reductions(rank: int) -> Any:
    strategy = Mirrored()
    given = {"a": rank, "b": [float(rank), torch.full((2,), rank)]}
    summed = strategy.reduce("sum", given)
    return (
        summed["a"], summed["b"][0], summed["b"][1].tolist(),
        strategy.reduce("mean", rank), strategy.reduce("max", rank),
        strategy.local_results(rank), given["b"][1].tolist(),
    )  # fmt: skip


def reductions_along_an_axis(rank: int) -> Any:
    """Rank r has r+1 rows, of r each."""
    strategy, rows = Mirrored(), torch.full((rank + 1, 2), float(rank))
    return [
        strategy.reduce(op, rows, axis=0).tolist()
        for op in ("SUM", "mean", "min", "max")
    ] + [strategy.reduce("SUM", float(rank), axis=None)]


def from_a_function() -> Any:
    strategy = Mirrored()

    def part(context: InputContext) -> list[int]:
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        size = context.get_per_replica_batch_size(8)
        first = context.input_pipeline_id * size
        return list(range(first, first + size))

    return strategy.distribute_datasets_from_function(part)


def shares() -> list[tuple[int, int]]:
    """(samples here, samples of all) of each batch, of 10 samples in batches of 8."""
    strategy = Mirrored()
    data, _, _ = samples()
    few = torch.utils.data.Subset(data, range(10))
    batches = strategy.distribute(few, 8)
    return [(len(labels), batches.in_hand) for _, labels in batches]


def with_a_schedule() -> float:
    """Train with a scheduler on CentralStorage's optimizer."""
    model, alone = nn.Linear(2, 1), nn.Linear(2, 1)
    strategy = CentralStorage()
    model, optimizer = strategy.setup(model, plain(model.parameters()))
    alone.load_state_dict(model.state_dict())
    single = plain(alone.parameters())
    schedules = [
        torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5)
        for each in (optimizer, single)
    ]
    for _step in range(3):
        for net, each in ((model, optimizer), (alone, single)):
            each.zero_grad()
            net(torch.ones(4, 2)).mean().backward()
            each.step()
        for schedule in schedules:
            schedule.step()
    return float((flat(model) - flat(alone)).abs().max())


def refusals() -> list[str]:
    """The messages that wrong arguments get."""
    start()
    model = nn.Linear(2, 2)
    bad = [
        lambda: Mirrored("tree"),
        lambda: Mirrored("nccl").setup(model, plain(model.parameters())),
        lambda: CentralStorage(root=7).setup(model, plain(model.parameters())),
        lambda: LocalSGD(every=0),
        lambda: LocalSGD().average(),
        lambda: Mirrored().reduce("xor", 1),
        lambda: Mirrored().reduce("sum", "one"),
        lambda: Mirrored().average_loss(torch.ones(3)),
        lambda: Mirrored().distribute(iter([1]), 2),
        lambda: LocalSGD().setup(model, torch.optim.LBFGS(model.parameters())),
        lambda: Mirrored(devices=["/gpu:0", "/gpu:1"]),
        lambda: Mirrored(devices=["/cpu:0"]),
        lambda: Mirrored(devices=["abacus:0"] * 2),
        lambda: MultiWorkerMirrored("tree"),
        lambda: OneDevice("/gpu:0"),
        lambda: CentralStorage().scope(),
        lambda: Mirrored().reduce("sum", torch.ones(2), axis=1),
        lambda: Mirrored().distribute_datasets_from_function(
            lambda context: context.get_per_replica_batch_size(3)
        ),
    ]
    messages = []
    for attempt in bad:
        try:
            attempt()
        except UsageError as error:
            messages.append(str(error))
    nbdist.barrier()
    return messages
