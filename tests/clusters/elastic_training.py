"""The cells of a training for the tests of elastic runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbdist.clusters.cluster import Cluster

SAMPLES = 240
GLOBAL_BATCH = 12
STEPS = SAMPLES // GLOBAL_BATCH

SETUP = """
import os, signal, time
from torch.nn.parallel import DistributedDataParallel as DDP

inputs = torch.randn(240, 8, generator=torch.Generator().manual_seed(1)).to(device)
targets = torch.randn(240, 4, generator=torch.Generator().manual_seed(2)).to(device)

def make_state(path=None, **more):
    torch.manual_seed(rank)  # the run gives all the values of rank 0
    model = torch.nn.Linear(8, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = nbdist.elastic.Sampler(240, 12)
    return nbdist.elastic.State(
        path, model=model, optimizer=optimizer, sampler=sampler, step=0, seen=[], **more
    )

def happen(place, state):
    for when, where, what in events:
        if (when, where) == (state.step, place) and first_time(what):
            what()

def first_time(event):
    try:
        os.close(os.open(f"{folder}/{event.__name__}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Failed:
    def query(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

def lose_context():
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_stream = lambda *_: Failed()
    Failed().query()

def step_of(state, ddp, indices):
    weight = nbdist.size() * len(indices) / 12  # DDP's mean is over ranks
    loss = (ddp(inputs[indices]) - targets[indices]).square().mean() * weight
    happen("forward", state)
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    state.sampler.advance()
    parts = nbdist.all_gather_object(indices)
    state.seen += [index for part in parts for index in part]
    state.step += 1

def steps(state):
    sizes.append(nbdist.size())
    ddp = DDP(state.model)
    for indices in state.sampler:
        step_of(state, ddp, indices)
        happen("commit", state)
        state.commit()
    return state.step

train = nbdist.elastic.run(steps)
events, sizes = [], []
"""


TRAIN = "state = make_state(); result = train(state)"


def prepare(cluster: Cluster, folder: Path) -> None:
    """Define the training on every rank. Each of its events happens once."""
    cluster.execute(SETUP)
    cluster.push(folder=str(folder))


def weights(cluster: Cluster) -> list[Any]:
    """The model's weight on each rank."""
    return cluster["state.model.weight.detach().cpu()"]


def assert_trained(cluster: Cluster, reference: Any) -> None:
    """Check that the weights equal an undisturbed training's and no sample is missing.

    In a world of another size, sums over ranks may round differently.
    """
    assert cluster["state.step"] == [STEPS] * cluster.size
    for weight in weights(cluster):
        assert (weight - reference).abs().max() < 1e-6
        assert weight.eq(weights(cluster)[0]).all()
    for seen in cluster["state.seen"]:
        assert sorted(seen) == list(range(SAMPLES))
