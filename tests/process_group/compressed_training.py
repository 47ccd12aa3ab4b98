"""Trains a model on digits whose gradients are compressed between hosts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from default_process_groups import meet, process_group
from mpi4py import MPI
from pretended_hosts import HOSTS_OF_TWO, pretending_hosts
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbdist.collectives import Group
from nbdist.collectives.transports.hierarchical import HierarchicalTransport

STEPS = 200
BATCH = 16
"""Samples of one rank in one step."""


Trained = dict[str, Any]
"""The end of a training on this rank:

    loss           of all digits
    weights        their bytes
    sent           bytes that this rank has sent compressed; 0 if it is no leader
    in_float32     bytes that a leader sends of as many gradients by a ring of float32
"""


def run(compressions: list[str]) -> dict[str, Trained]:
    """Train once with each compression; "" for none. Every rank must call."""
    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    trained = {}
    with tempfile.TemporaryDirectory() as own, pytest.MonkeyPatch.context() as patch:
        folder = Path(world.bcast(own))
        for name in compressions:
            patch.setenv("NBDIST_COMPRESSION", name)
            with (
                pretending_hosts(HOSTS_OF_TWO),
                process_group(folder / f"store-{name}") as group,
            ):
                trained[name] = _train(group)
            meet()  # the folder is shared
    return trained


def _train(group: Group) -> Trained:
    digits = load_digits()
    samples = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    transport = group.transport("cpu")
    assert isinstance(transport, HierarchicalTransport)
    draw = torch.Generator().manual_seed(group.rank)
    for _ in range(STEPS):
        chosen = torch.randint(len(samples), (BATCH,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(ddp(samples[chosen]), labels[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        loss = F.cross_entropy(model(samples), labels).item()
    flat = torch.cat([each.detach().view(-1) for each in model.parameters()])
    compressed = transport._compressed
    hosts = len(set(group.hosts))
    return {
        "loss": loss,
        "weights": flat.numpy().tobytes(),
        "sent": 0 if compressed is None else compressed.sent_bytes,
        "in_float32": STEPS * 2 * (hosts - 1) * flat.numel() * 4 // hosts,
    }
