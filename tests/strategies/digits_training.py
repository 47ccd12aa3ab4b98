"""Trains on handwritten digits, in one process or with a strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

TRAIN = 1437
"""Training samples of the 1797; the others are the test set. No multiple of `BATCH`."""
BATCH = 96
EPOCHS = 20
Make = Callable[[Iterator[nn.Parameter]], Optimizer]


@functools.cache
def samples() -> tuple[TensorDataset, Tensor, Tensor]:
    """The training set, and the images and labels of the test set."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.get_default_dtype()) / 16
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return (
        TensorDataset(images[:TRAIN], labels[:TRAIN]), images[TRAIN:], labels[TRAIN:],
    )  # fmt: skip


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def sgd(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def accuracy(model: nn.Module) -> float:
    _, images, labels = samples()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


def flat(model: nn.Module) -> Tensor:
    """All parameters of a model in one tensor."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_alone(epochs: int, make: Make = sgd) -> nn.Module:
    """Train in one process, on the same global batches in the same order."""
    from nbdist.training.data.sampler import epoch_order

    data, _, _ = samples()
    model = make_model()
    optimizer = make(model.parameters())
    for epoch in range(epochs):
        order = torch.tensor(epoch_order(TRAIN, 5, epoch, shuffle=True))
        for batch in order.split(BATCH):
            images, labels = data[batch]
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model


def train_with(
    strategy: Any,
    epochs: int,
    make: Make = sgd,
    before_step: Any = None,
    device: torch.device | str = "cpu",
) -> tuple[nn.Module, list[float]]:
    """Train with a strategy; return the model, and the mean loss of each epoch."""
    data, _, _ = samples()
    model = make_model(seed=strategy.replica or 0).to(device)
    model, optimizer = strategy.setup(model, make(model.parameters()))
    batches = strategy.distribute(data, BATCH, shuffle=True, seed=5)

    def train() -> list[float]:
        means = []
        for _epoch in range(epochs):
            losses = []
            for batch in batches:
                images, labels = (each.to(device) for each in batch)
                optimizer.zero_grad()
                losses_here = cross_entropy(model(images), labels, reduction="none")
                loss = strategy.average_loss(losses_here)
                loss.backward()
                if before_step is not None:
                    before_step(len(losses))
                optimizer.step()
                losses.append(float(loss.detach()) * batches.in_hand / TRAIN)
            means.append(sum(losses))
        return means

    return model, strategy.run(train)
