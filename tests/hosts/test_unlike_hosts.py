"""A cluster on hosts that differ in all that hosts of one user may differ in.

The traits of the hosts are drawn at random, and printed; see `traits.drawn`.
"""

from __future__ import annotations

import pytest

from tests.hosts import traits
from tests.hosts.conftest import NAMES
from tests.hosts.console import Console
from tests.hosts.network import HostNetwork, TestHost, why_not
from tests.hosts.test_lost_hosts import START, WAIT
from tests.hosts.test_slurm import SUM
from tests.processes import HANG_S, wait_until
from tests.seed import SEED

OFTEN, SOAK = 6, 200
NETWORKS = ("", "eth1", "10.78.0.0/24")
"""What -H's hosts are to reach each other by, where there are two; "" for no option."""
TRAIN = """
torch.manual_seed(rank)
net = torch.nn.Linear(20, 3)
ddp = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(5):
    loss = ddp(torch.randn(8, 20)).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
print(net.weight.sum().item())
"""
KILL = "if rank == 3: os.kill(os.getpid(), 9)\nnbdist.barrier()"


def slots_on(host: TestHost) -> str:
    """Two slots of a host, as -H takes them."""
    if host.traits.environment.startswith("/"):
        return f"{host.traits.user}@{host.name}:2:python={host.python}"
    return f"{host.name}:2"


def work(console: Console) -> None:
    """Run cells, move values, train, and lose a rank."""
    assert console.value(f"printed({SUM!r})") == ["10"] * 4
    console.do("cluster.push(big=bytes(3_000_000), word='two')")
    assert console.value("cluster['word']") == ["two"] * 4
    assert console.value("[len(v) for v in cluster['big']]") == [3_000_000] * 4
    assert console.value(f"len(set(printed({TRAIN!r})))") == 1
    error = console.error(f"cluster.execute({KILL!r})")
    assert "rank 3" in error
    assert "it has the variables of rank 0" in error
    assert console.value("cluster['word']") == ["two"] * 4
    assert console.value(f"printed({SUM!r})") == ["10"] * 4


def lose(console: Console, host: TestHost) -> None:
    """Cut the link of a host while a cell runs, and start ranks there again."""
    console.begin(f"cluster.execute({WAIT!r})")
    host.cut()
    _, _, error = console._answer()
    assert f"{host.name}) was lost with its host" in error
    host.restore()
    wait_until(lambda: host.processes() == [], HANG_S, str)
    console.do("cluster.scale(4)")
    assert console.value(f"printed({SUM!r})") == ["10"] * 4


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    "draw",
    [n if n < OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in range(SOAK)],
)
def test_a_cluster_works_on_hosts_that_differ(draw: int) -> None:
    seed = f"{SEED} {draw}"
    worst = {"delay_s": 0.02, "loss": 0.01 if draw < OFTEN else 0.05}
    chosen = traits.drawn(seed, len(NAMES), environments=True, **worst)
    for name, has in zip(NAMES, chosen, strict=True):
        print(f"host {name}: {has}")
    with HostNetwork(NAMES, chosen) as network:
        a, b, laptop = (network[name] for name in ("a", "b", "laptop"))
        first = a if draw % 2 else laptop
        listed = ["a:2" if first is a else slots_on(a), slots_on(b)]
        start = START.replace("a:2,b:2", ",".join(listed))
        on = NETWORKS[draw % 3] if chosen[0].networks == 2 else ""
        if on:
            start = start.replace('device="cpu"', f'device="cpu", interface="{on}"')
        with first.console() as console:
            console.do(start)
            expected = "eth1" if on else "eth0"
            assert console.value("{i.interface for i in cluster.infos}") == {expected}
            work(console)
            lose(console, b)
            console.do("cluster.stop()")
        for host in {a, b, first}:
            wait_until(lambda host=host: host.processes() == [], HANG_S, str)
            assert host.left_behind() == set()
