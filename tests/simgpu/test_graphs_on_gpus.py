"""What nbdist's own threads do with CUDA beside the user's threads.

While a thread captures a CUDA graph, most calls that wait are prohibited to the
others, and invalidate the graph. A thread that has not chosen a GPU makes a context on
the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nbdist import CellError, Cluster
from nbdist.session import Session
from tests.clusters.test_looking import ended_by, rows_of, running
from tests.remove_variables import remove_variables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

PREPARE = """
import threading, time
from pathlib import Path
import torch, nbdist
from nbdist.collectives.call_timing import _Timed, gpu_timer
from nbdist.engine.rank import this_rank
from nbdist.telemetry.recorder import _Draft
from nbdist.telemetry.scalars import capture
from tests.processes import HANG_S, wait_until
tensor, graph = torch.zeros(5), torch.cuda.CUDAGraph()
MORE_STREAMS = 40  # than torch's pool has
nbdist.all_reduce(tensor)
"""
SAMPLED = """
events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
for event in events:
    event.record()
with torch.cuda.graph(graph):
    tensor.add_(1)
    gpu_timer._pending.append(_Timed(torch.cuda.current_device(), *events, 0.0))
    wait_until(lambda: not gpu_timer._pending)
"""
LOGGED = """
value = capture("loss", tensor.sum())
recorder = this_rank().recorder
with torch.cuda.graph(graph):
    tensor.add_(1)
    recorder.record(_Draft(rank, 0, time.time(), {"loss": value}, False))
    assert recorder.flush(HANG_S)
"""
ASYNCHRONOUS = """
others = torch.ones(MORE_STREAMS, 5).unbind()
begun = Path(FOLDER) / "begun"
if rank == 0:
    handles = [nbdist.all_reduce(each, async_op=True) for each in others]
    with torch.cuda.graph(graph):
        tensor.add_(1)
        begun.touch()
        wait_until(lambda: all(each.is_completed() for each in handles))
    for each in handles:
        each.wait()
else:
    wait_until(begun.exists)
    for each in others:
        nbdist.all_reduce(each)
    with torch.cuda.graph(graph):
        tensor.add_(1)
assert all((each == world_size).all() for each in others)
"""
HOROVOD = """
import nbdist.horovod as hvd
hvd.init()
handles = [
    hvd.allreduce_async(torch.ones(5), op=hvd.Sum) for _ in range(MORE_STREAMS)
]
with torch.cuda.graph(graph):
    tensor.add_(1)
    wait_until(lambda: all(map(hvd.poll, handles)))
assert all((hvd.synchronize(each) == world_size).all() for each in handles)
"""
LOOKED_AT = """
ended = threading.Event()
with torch.cuda.graph(graph):
    tensor.add_(1)
    print(1)
    assert ended.wait(HANG_S)
"""
WATCHED = """
class Adds(torch.nn.Linear):
    def forward(self, x):
        return x.add_(1)
model = Adds(1, 1)
watch = nbdist.watch(model)
model(tensor)  # its results are under way
with torch.cuda.graph(graph):
    model(tensor.sub_(1))
watch.check()
watch.close()
"""
REPLAY = """
graph.replay()
torch.cuda.synchronize()
assert (tensor == 1).all(), tensor
"""


@pytest.fixture(
    scope="module",
    params=["one GPU", pytest.param("a GPU each", marks=pytest.mark.gpus(2))],
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    has_own = request.param == "a GPU each"
    if has_own and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    shared = None if has_own else 2
    with Cluster(2, device="cuda", ranks_per_gpu=shared, threads=1) as running:
        yield running


@pytest.fixture
def cluster(ranks: Cluster) -> Cluster:
    ranks.run(remove_variables)
    ranks.execute(f"torch.set_default_device(device)\n{PREPARE}")
    return ranks


@pytest.mark.parametrize("beside", [SAMPLED, LOGGED, ASYNCHRONOUS, HOROVOD, WATCHED])
def test_a_graph_is_captured_beside(
    cluster: Cluster, beside: str, tmp_path: Path
) -> None:
    cluster.execute(f"FOLDER = {str(tmp_path)!r}\n{beside}{REPLAY}")


def test_a_value_that_a_graph_computes_is_not_logged(cluster: Cluster) -> None:
    code = "with torch.cuda.graph(graph): nbdist.log(loss=tensor[0].add_(1))"
    with pytest.raises(CellError, match=r"log\(loss=.*: log after graph\.replay"):
        cluster.execute(code)


def test_a_graph_is_captured_beside_looks(cluster: Cluster) -> None:
    session = Session()
    session._cluster = cluster
    with ended_by(cluster, LOOKED_AT, "ended.set()") as results:
        assert rows_of(session.variables_table("tensor"))
        for _ in range(40):  # torch's pool has 32 streams
            look = cluster.look("tensor.sum().item()")
            assert [look[rank].text for rank in (0, 1)] == ["0.0", "0.0"]
        session.status_table()
        session.memory_tables(3)
    assert results[0].ok
    cluster.execute(REPLAY)


def test_a_rank_makes_no_context_on_another_gpu(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Of which the other GPU's rank would lack the memory."""
    cluster.execute(
        f"FOLDER = {str(tmp_path)!r}\n"
        f"{PREPARE}{ASYNCHRONOUS}{PREPARE}{HOROVOD}{PREPARE}{LOGGED}{PREPARE}{SAMPLED}"
    )
    with running(cluster, "while True: pass", [0, 1]):
        cluster.look("tensor.sum().item()")
    cluster.execute("nbdist.all_reduce(tensor, async_op=True).wait()")
    contexts = "[torch._C._cuda_hasPrimaryContext(i) for i in range({})]"
    found = cluster.pull(contexts.format("torch.cuda.device_count()"))
    own = cluster.pull("[i == device.index for i in range(torch.cuda.device_count())]")
    assert found == own
