"""Values that the user computes on a stream of his own, and nbdist reads.

Each draw chooses how nbdist gets the value, the stream that is current, the current
device and the length of the kernel before it. NBDIST_SEED=1234 repeats a draw.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nbdist import Cluster
from tests.gpu_marks import needs_gpus, simulated
from tests.processes import wait_until
from tests.seed import CHOSEN, SEED

N = 2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(2),
    pytest.mark.timeout(400),
    simulated,
    needs_gpus(N),
]

SETUP = """
import contextlib, gc, random
from torch import nn
from nbdist.errors import NotFinite
TICKS_OF_A_MS = 2_000_000
own = torch.device(device)
streams = [torch.cuda.default_stream(own), *(torch.cuda.Stream(own) for _ in range(2))]

@contextlib.contextmanager
def somewhere(chance):
    '''A stream and a device are current; some other streams are busy.'''
    stream = chance.choice(streams)
    for other in streams:
        if other is not stream and chance.random() < 0.5:
            with torch.cuda.stream(other):
                torch.cuda._sleep(5 * TICKS_OF_A_MS)
    elsewhere = torch.cuda.device_count() > 1 and chance.random() < 0.4
    with torch.cuda.stream(stream):
        with torch.cuda.device(1 - own.index if elsewhere else own):
            yield stream

def late(chance, values):
    '''The values on the own GPU, after a kernel.'''
    held = values.to(own)
    made = torch.full_like(held, 77)
    with torch.cuda.device(own):
        torch.cuda._sleep(chance.choice([0, 1, 5]) * TICKS_OF_A_MS)
    return made.copy_(held)

def batches(chance):
    '''Loops over a loader, whose batches are read late, one loop after another.'''
    data = torch.utils.data.TensorDataset(torch.arange(4000.0).view(40, 100))
    loader = nbdist.loader(data, 2, shuffle=False, num_workers=0)
    wanted = [part for (part,) in nbdist.loader(data, 2, shuffle=False,
                                                num_workers=0, device="cpu")]
    for _ in range(2):
        got = []
        with somewhere(chance) as stream:
            for (batch,) in loader:
                assert batch.device == own
                room = torch.full_like(batch, 77)
                with torch.cuda.device(own):
                    torch.cuda._sleep(chance.choice([0, 1]) * TICKS_OF_A_MS)
                got.append(room.copy_(batch))
        streams[0].wait_stream(stream)  # the loops are in order
        for other in streams[1:]:
            other.wait_stream(stream)
        torch.cuda.synchronize(own)
        assert all(map(torch.equal, [each.cpu() for each in got], wanted))

def logged(chance):
    '''Scalars that are overwritten right after `log`.'''
    with somewhere(chance):
        for number in range(20):
            value = late(chance, torch.tensor(number + 1.0))
            nbdist.log(**{f"s{seed}": value})
            value.fill_(-1)

def watched(chance):
    '''Steps on changing streams are finite, and one NaN is found.'''
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(own)
    watch = nbdist.watch(model)
    spoiled = chance.choice([None, 2, 5])
    try:
        for step in range(1, 6):
            with somewhere(chance) as stream:
                for other in streams:
                    stream.wait_stream(other)  # the steps are in order
                x = torch.ones(3, 4)
                if step == spoiled:
                    x[1, 2] = float("nan")
                model(late(chance, x)).sum().backward()
                model.zero_grad()
        with somewhere(chance):
            watch.check()
    except NotFinite as error:
        assert str(error).startswith(f"step {spoiled}: the output of 0"), error
    else:
        assert spoiled is None, f"the NaN of step {spoiled} was not found"
    finally:
        watch.close()

def committed(chance):
    '''A commit has the values of its stream; so has the restored tensor.'''
    values = torch.arange(5000.0) + seed
    holder = nn.Linear(1, 5000, bias=False).to(own)
    state = nbdist.elastic.State(model=holder)
    weight = holder.weight.data.view(-1)
    for _ in range(3):
        with somewhere(chance) as stream:
            weight.copy_(late(chance, values))
            state.commit()
            weight.fill_(-1)
        torch.cuda.synchronize(own)
        with somewhere(chance) as stream:
            late(chance, values)
            state.restore()
            seen = weight.clone()
        stream.synchronize()
        assert torch.equal(seen.cpu(), values), seen
        values += 1

def saved(chance):
    '''A state is written to files while its tensors are still computed.'''
    from pathlib import Path
    import tempfile
    from nbdist.training.elastic.shared_copies import _Copy
    values = torch.arange(5000.0) + seed
    with tempfile.TemporaryDirectory() as folder:
        copy = _Copy()
        with somewhere(chance):
            tensor = late(chance, values)
            copy.lay_out([tensor], [Path(folder)])
            (on_gpu,) = copy.fill([tensor])
            assert torch.equal(copy._shared[0], values), copy._shared
            tensor.fill_(-1)
        torch.cuda.synchronize(own)
        assert torch.equal(on_gpu.cpu(), values), on_gpu

def pulled(chance):
    '''A cell ends before the kernels of its streams.'''
    global x, y
    with somewhere(chance):
        x = late(chance, torch.arange(5000.0) + seed + rank)
        y = {"row": x.view(50, 100).t()[3], "part": x[7:9]}
"""


def pulled_are_right(cluster: Cluster, seed: int) -> None:
    for rank, (x, y) in enumerate(cluster["x, y"]):
        expected = torch.arange(5000.0) + seed + rank
        assert torch.equal(x.cpu(), expected), (x, seed)
        assert torch.equal(y["row"].cpu(), expected.view(50, 100).t()[3])
        assert torch.equal(y["part"].cpu(), expected[7:9])


def logged_are_right(cluster: Cluster, seed: int) -> None:
    name = f"s{seed}"

    def values() -> list[list[float]]:
        if name not in cluster.collector.metrics:
            return []
        history = cluster.collector.history(name)
        return [list(map(float, history[rank][1])) for rank in sorted(history)]

    wait_until(lambda: list(map(len, values())) == [20] * N, 20)
    assert values() == [[number + 1.0 for number in range(20)]] * N, (seed, values())


CHECKS = {"pulled": pulled_are_right, "logged": logged_are_right}
KINDS = ("batches", "logged", "watched", "committed", "saved", "pulled")


@pytest.fixture(scope="module", params=["one GPU", "a GPU each"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    shared = N if request.param == "one GPU" else None
    with Cluster(N, device="cuda", ranks_per_gpu=shared, threads=1) as cluster:
        cluster.execute(SETUP)
        yield cluster


def draws_hold(cluster: Cluster, kind: str, first: int, count: int) -> None:
    for seed in range(first, first + count):
        cluster.execute(
            f"seed = {seed}\n{kind}(random.Random(100 * seed + rank))", timeout_s=60
        )
        CHECKS.get(kind, lambda *_: None)(cluster, seed)


@pytest.mark.streams
@pytest.mark.parametrize("kind", KINDS)
def test_12_draws(ranks: Cluster, kind: str) -> None:
    draws_hold(ranks, kind, SEED, 1 if CHOSEN else 12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_200_draws(ranks: Cluster, kind: str) -> None:
    draws_hold(ranks, kind, SEED + 12, 200)
