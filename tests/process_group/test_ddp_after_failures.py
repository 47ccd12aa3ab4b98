"""A model under DDP continues to train after deaths, errors and interrupts."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from nbdist import CellError, Cluster
from tests.processes import wait_until
from tests.seed import SEED

RANKS = 3
SAMPLES = 12  # of every step, divided among 2 or 3 ranks
DEADLINE_S = 30.0

SETUP = f"""
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
own = None if device.type == "cpu" else [device]
model = DistributedDataParallel(net, device_ids=own)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def step(number):
    data = torch.randn({SAMPLES}, 8, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(data[rank::world_size].to(device)).square().mean().backward()
    optimizer.step()

def weights():
    return torch.cat([p.detach().flatten().cpu() for p in net.parameters()])
"""


def expected_weights(steps: int) -> torch.Tensor:
    """The weights that one process reaches."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for number in range(steps):
        data = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        net(data).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def check_weights(cluster: Cluster, steps: int) -> None:
    for weights in cluster["weights()"]:
        torch.testing.assert_close(weights, expected_weights(steps))


def kill(cluster: Cluster, rank: int) -> None:
    os.kill(cluster.ranks[rank].pid, signal.SIGKILL)
    wait_until(lambda: rank in cluster.died(), DEADLINE_S)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    on_failure = getattr(request, "param", "replace")
    with Cluster(RANKS, device="cpu", on_failure=on_failure) as running:
        running.execute(SETUP)
        running.execute("for number in range(4): step(number)", timeout_s=DEADLINE_S)
        yield running


@pytest.mark.parametrize("cluster", ["replace", "shrink"], indirect=True)
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_model_trains_on_after_a_death_between_two_cells(
    cluster: Cluster, rank: int
) -> None:
    kill(cluster, rank)
    cluster.execute("for number in range(4, 8): step(number)", timeout_s=DEADLINE_S)
    check_weights(cluster, 8)


def test_a_model_trains_on_after_each_of_several_deaths(cluster: Cluster) -> None:
    for death, rank in enumerate([2, 0, 1, 0]):
        kill(cluster, rank)
        cluster.execute(f"step({4 + death})", timeout_s=DEADLINE_S)
    check_weights(cluster, 8)


def test_a_model_trains_on_in_a_world_of_another_size(cluster: Cluster) -> None:
    cluster.scale(2, drop=True)
    cluster.execute("step(4)", timeout_s=DEADLINE_S)
    cluster.scale(4)
    cluster.execute("step(5)", timeout_s=DEADLINE_S)
    check_weights(cluster, 6)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_model_can_be_used_after_a_death_within_a_step(
    cluster: Cluster, rank: int
) -> None:
    """The gradients of that step are lost, as an exception says."""
    with pytest.raises(CellError, match="RankDied"):
        cluster.execute(
            "import os, signal\n"
            f"if rank == {rank}:\n"
            "    end = lambda gradient: os.kill(os.getpid(), signal.SIGKILL)\n"
            "    net[0].weight.register_hook(end)\n"
            "step(4)",
            timeout_s=DEADLINE_S,
        )
    cluster.execute("step(4)", timeout_s=DEADLINE_S)
    check_weights(cluster, 5)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_model_trains_on_after_an_error_within_a_step(
    cluster: Cluster, rank: int
) -> None:
    with pytest.raises(CellError, match="ValueError: within"):
        cluster.execute(
            "def fail(gradient):\n"
            "    raise ValueError('within')\n"
            f"if rank == {rank}:\n"
            "    hook = net[0].weight.register_hook(fail)\n"
            "step(4)",
            timeout_s=DEADLINE_S,
        )
    cluster.execute(f"if rank == {rank}: hook.remove()\nstep(4)", timeout_s=DEADLINE_S)
    check_weights(cluster, 5)


def test_a_model_trains_on_after_time_outs_at_random_moments(cluster: Cluster) -> None:
    rng = random.Random(SEED)
    for _ in range(10):
        with pytest.raises(CellError, match="not finished after"):
            cluster.execute("while True: step(4)", timeout_s=rng.uniform(0.02, 0.3))
        # The ranks may have ended at different steps.
        cluster.execute(
            "for parameter in net.parameters():\n"
            "    nbdist.broadcast(parameter.data)\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "for number in range(3): step(number)",
            timeout_s=DEADLINE_S,
        )
        first, *others = cluster["weights()"]
        assert all(torch.equal(first, other) for other in others)


def test_a_hook_with_a_group_of_its_own_follows_the_model(cluster: Cluster) -> None:
    cluster.execute(
        "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook\n"
        "import torch.distributed as dist\n"
        "compressed = DistributedDataParallel(net)\n"
        "state = powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2)\n"
        "compressed.register_comm_hook(state, powerSGD_hook.powerSGD_hook)\n"
        "compressed(torch.ones(3, 8, device=device)).sum().backward()\n"
    )
    kill(cluster, 1)
    cluster.execute(
        "for number in range(4):\n"
        "    net.zero_grad()\n"
        "    data = torch.full((3, 8), rank + 1.0, device=device)\n"
        "    compressed(data).sum().backward()\n"
        "gradient = net[0].weight.grad.cpu()",
        timeout_s=DEADLINE_S,
    )
    first, *others = cluster["gradient"]
    assert all(torch.equal(first, other) for other in others)
    assert cluster["state.iter"] == [5] * RANKS, "the hook was called on each rank"


def test_a_model_of_a_static_graph_begins_again(cluster: Cluster) -> None:
    """Its first backward pass reduces the gradients in another way than the later."""
    cluster.execute(
        "torch.manual_seed(0)\n"
        "for layer in net[::2]: layer.reset_parameters()\n"
        "model = DistributedDataParallel(net, device_ids=own, static_graph=True)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "for number in range(2): step(number)"
    )
    with pytest.raises(CellError, match="has ended"):
        cluster.execute("if rank: nbdist.barrier()", timeout_s=DEADLINE_S)
    cluster.execute("for number in range(2, 4): step(number)", timeout_s=DEADLINE_S)
    kill(cluster, 1)
    cluster.execute("for number in range(4, 6): step(number)", timeout_s=DEADLINE_S)
    check_weights(cluster, 6)


def test_a_hook_whose_state_is_the_default_group_follows_the_model(
    cluster: Cluster,
) -> None:
    cluster.execute(
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        "import torch.distributed as dist\n"
        "model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)"
    )
    cluster.scale(2, drop=True)
    cluster.execute("for number in range(4, 6): step(number)", timeout_s=DEADLINE_S)
    check_weights(cluster, 6)


def test_an_asynchronous_call_on_a_group_of_the_old_world_is_an_error(
    cluster: Cluster,
) -> None:
    cluster.execute(
        "import torch.distributed as dist\nold, some = dist.group.WORLD, torch.ones(1)"
    )
    kill(cluster, 1)
    with pytest.raises(CellError, match="was closed"):
        cluster.execute(
            "dist.distributed_c10d._world.pg_map[old] = ('nbdist', None)\n"
            "work = old.allreduce([some])\n"
            "work.wait()",
            [0, 2],
            timeout_s=DEADLINE_S,
        )
