"""Functions that tests/training/test_on_ranks.py runs on ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from nbdist.collectives import Group, barrier, default_group, set_default_group
from nbdist.errors import SaveError
from nbdist.training import files
from nbdist.training.data.loader import loader
from nbdist.training.elastic.state import State
from nbdist.training.seeds import seed_all
from tests.process_group.default_process_groups import process_group


def everything(folder: str) -> dict[str, Any]:
    """Run all functions of this file in one world."""
    saved = Path(folder) / "saved"
    saved.mkdir(exist_ok=True)
    return {
        "uneven": train_uneven(f"{folder}/uneven"),
        "joined": train_joined(f"{folder}/joined"),
        "saved": save_and_load(str(saved)),
        "states": save_and_load_states(saved.parent),
        "seeded": seeded(),
    }


def join() -> Group:
    """The default group of this world."""
    group = Group(MPI.COMM_WORLD.Dup())
    set_default_group(group)
    return group


def save_and_load(folder: str) -> dict[str, Any]:
    """Save, load, and fail to save. Returns this rank's results and errors."""
    rank = join().rank
    path = Path(folder) / "model.pt"
    files.save({"rank": rank, "weight": torch.full((3,), float(rank))}, path)
    there = path.exists()
    barrier()
    reasons = []
    for bad in ("missing/model.pt", "model.pt"):
        try:  # the second time, rank 0 saves a value that cannot be pickled
            files.save(None if bad != "model.pt" else lambda: None, path.parent / bad)
        except SaveError as error:
            reasons.append(str(error))
    return {
        "there": there,
        "loaded": files.load(path),
        "reasons": reasons,
        "left": sorted(os.listdir(folder)),
    }


def save_and_load_states(folder: Path) -> dict[str, Any]:
    """Load states right after they are saved; return values, and a save's error."""
    rank = default_group().rank
    loaded = []
    for number in range(5):
        state = State(weight=torch.full((1 << 20,), float(rank + number)))
        state.save(folder / f"state-{number}")
        state.load(folder / f"state-{number}")
        loaded.append(float(state.weight[0]))
    try:
        state.save(folder / "missing" / "state")
    except SaveError as error:
        return {"loaded": loaded, "reason": str(error)}
    raise AssertionError("a save in a missing folder went well")


def train_uneven(store: str) -> dict[str, Any]:
    """Train one epoch by DDP on weighted parts of uneven size."""
    with process_group(Path(store)) as group:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1).double()
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = loader(samples(), 4, seed=2)  # 13 samples: 12 and 1 in all
        weights = []
        for x, y in batches:
            losses = (replica(x) - y).square().squeeze(1)
            weights.append((len(x), batches.weight))
            optimizer.zero_grad()
            batches.average(losses).backward()
            optimizer.step()
        return {
            "rank": group.rank,
            "weights": weights,
            "parameters": [p.detach().numpy() for p in model.parameters()],
        }


def train_joined(store: str) -> dict[str, Any]:
    """Train one epoch under torch's Join, which some ranks end early."""
    with process_group(Path(store)):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1).double()
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = 0
        with Join([replica]):
            for x, y in loader(samples(), 4, join=True):
                optimizer.zero_grad()
                (replica(x) - y).square().mean().backward()
                optimizer.step()
                steps += 1
        return {
            "steps": steps,
            "parameters": [p.detach().numpy() for p in model.parameters()],
        }


def samples() -> TensorDataset:
    """13 samples, equal on all ranks."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(13, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def seeded() -> tuple[list[float], list[float]]:
    """The weights of an equally seeded model, and numbers that are drawn later."""
    with seed_all(5):
        model = torch.nn.Linear(3, 1)
    return model.weight.flatten().tolist(), torch.rand(3).tolist()
