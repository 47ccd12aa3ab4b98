"""torchft's manager and DDP over nbdist: the loop of torchft's example, on noise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdist import Cluster
from nbdist.errors import CellError

torchft = pytest.importorskip("torchft")

TRAIN = """
import os, signal
from datetime import timedelta
from torch import nn, optim
from torchft import DistributedDataParallel, Manager, Optimizer
from nbdist.torchft import ProcessGroup

def load(state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

def save():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
torch.manual_seed(rank)
model = nn.Linear(4, 1)
manager = Manager(
    pg=ProcessGroup(timeout=timedelta(seconds=10)),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=save,
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    lighthouse_addr=lighthouse,
    replica_id=f"replica_{rank}",
    hostname="127.0.0.1",
    timeout=timedelta(seconds=20),
)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9))
sizes, losses = [], []
while manager.current_step() < 30:
    if rank == victim and manager.current_step() == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(8, 4)
    optimizer.zero_grad()
    loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    sizes.append(manager.num_participants())
    losses.append(loss.item())
trained = model.weight.detach().clone(), manager.current_step()
manager.shutdown(wait=False)
"""


@pytest.fixture
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=2000)
    yield server.address()
    server.shutdown()


def test_a_rank_dies_and_the_others_train_on_in_one_cell(lighthouse: str) -> None:
    with Cluster(n=3, device="cpu", threads=1) as cluster:
        cluster.push(lighthouse=lighthouse, victim=1)
        with pytest.raises(CellError, match=r"rank 1 .* has died with SIGKILL"):
            cluster.execute(TRAIN, timeout_s=90)
        (first, steps), (second, _) = (cluster.on([n])["trained"][0] for n in (0, 2))
        assert steps == 30
        assert first.equal(second)
        sizes, losses = cluster.on([0])["sizes, losses"][0]
        assert sizes[-10:] == [2] * 10
        assert losses[-1] < losses[0] / 2
        cluster.execute("assert dist.get_world_size() == 3; nbdist.barrier()")
