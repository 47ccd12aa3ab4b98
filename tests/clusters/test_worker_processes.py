"""What a cell defines reaches the workers of `multiprocessing`, and returns."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from nbdist import Cluster
from nbdist.errors import CellError
from tests.processes import HANG_S
from tests.seed import SEED

DRAW = random.Random(SEED)
NUMBER = DRAW.randrange(2, 1000)
RANK = DRAW.randrange(4)

SOME = f"""
import enum, multiprocessing as mp, os, sys, threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from torch.utils.data import DataLoader, Dataset, Sampler
number = {NUMBER}
@dataclass
class Sample:
    value: int
def sample(i):
    return Sample(number * i)
"""
SPAWN = pytest.param("spawn", marks=pytest.mark.slow)
"""Each worker imports torch anew, for seconds. What it gets is as with forkserver."""
UNFORKED = pytest.mark.parametrize("method", ["forkserver", SPAWN])
EACH = pytest.mark.parametrize("method", ["fork", "forkserver", SPAWN])


def run(cluster: Cluster, *cells: str) -> str:
    """Run cells after `SOME` on one rank; what they have printed."""
    results = [
        cluster.execute(cell, ranks=[RANK], timeout_s=HANG_S) for cell in (SOME, *cells)
    ]
    return "".join(result[RANK].stdout for result in results)


# -- what arrives ------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_data_loader_uses_the_classes_and_functions_of_cells(
    cluster: Cluster, method: str
) -> None:
    cell = f"""
class Samples(Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return sample(i)
class Backwards(Sampler):
    def __iter__(self): return iter(range(5, -1, -1))
def collate(samples):
    assert begun
    return samples
def begin(worker):
    global begun
    begun = True
loader = DataLoader(
    Samples(), batch_size=2, num_workers=2, sampler=Backwards(), collate_fn=collate,
    worker_init_fn=begin, persistent_workers=True, multiprocessing_context="{method}",
)
for _epoch in range(2):
    samples = [each for batch in loader for each in batch]
    assert samples == [Sample(number * i) for i in range(5, -1, -1)], samples
"""
    # The second time, the same names are other classes and functions.
    run(cluster, cell, f"number += 1\n{cell}\ndel loader")


@EACH
def test_a_pool_calls_the_functions_of_cells(cluster: Cluster, method: str) -> None:
    run(
        cluster,
        f"""
given, filled = None, []
def begin(value):
    global given
    given = value
def with_given(i):
    filled.append(i)
    return given, len(filled)
def adder(n):
    def add(i): return i + n
    return add
pool = mp.get_context("{method}").Pool(1, begin, (number,))
assert pool.map(sample, range(3)) == [sample(i) for i in range(3)]
assert pool.map(with_given, range(3), 1) == [(number, n) for n in (1, 2, 3)]
assert pool.map(lambda i: i * number, range(3)) == [0, number, 2 * number]
assert pool.map(adder(number), [1]) == [number + 1]
assert pool.map(Sample, [1]) == [Sample(1)]
assert pool.map(Sample(5).__eq__, [Sample(5)]) == [True]
pool.terminate()
""",
    )


@EACH
def test_a_pool_calls_what_a_later_cell_defines(cluster: Cluster, method: str) -> None:
    run(
        cluster,
        f'pool = mp.get_context("{method}").Pool(1)\n'
        "def help(i): return i\n"
        "def work(i): return Sample(help(i) + number)\n"
        "assert pool.apply(work, (1,)) == Sample(number + 1)",
        "def work(i): return Sample(help(i) - number)\n"
        "assert pool.apply(work, (1,)) == Sample(1 - number)",
        "def help(i): return 2 * i\n"
        "@dataclass\n"
        "class Sample:\n"
        "    other: int\n"
        "assert pool.apply(work, (1,)) == Sample(2 - number)\n"
        "pool.terminate()",
    )


@EACH
def test_processes_and_executors_call_the_functions_of_cells(
    cluster: Cluster, method: str
) -> None:
    shown = run(
        cluster,
        f"""
import torch.multiprocessing as tmp
context = tmp.get_context("{method}")
queue = context.SimpleQueue()
tasks = context.Queue()
tasks.put((sample, Sample(1)))  # before there is a worker
def work():
    function, argument = tasks.get()
    queue.put(function(argument.value))
process = context.Process(target=work)
process.start()
assert queue.get() == sample(1)
process.join()
with ProcessPoolExecutor(1, mp_context=context) as executor:
    assert executor.submit(sample, 2).result() == sample(2)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
def train(index, net, queue):
    with torch.no_grad():
        net.weight += number
    queue.put(net.state_dict()["weight"].item())
    assert type(net) is Net
net = Net()
tmp.start_processes(train, (net, queue), nprocs=1, start_method="{method}")
assert queue.get() == number
print(net.weight.item())
""",
    )
    # As always with torch.multiprocessing, a process that is not forked shares tensors.
    assert float(shown) == (0 if method == "fork" else NUMBER)


NOTEBOOK = """
import multiprocessing
def begin(value):
    global begun
    begun = value
def add(i):
    return i + begun
def added(method, number):
    with multiprocessing.get_context(method).Pool(1, begin, (number,)) as pool:
        return pool.map(add, range(2)), pool.apply(lambda: begun)
"""


@EACH
def test_a_function_of_the_notebook_uses_workers(cluster: Cluster, method: str) -> None:
    notebook: dict[str, Any] = {"__name__": "__main__"}
    exec(NOTEBOOK, notebook)
    (values,) = cluster.run(
        notebook["added"], method, NUMBER, ranks=[RANK], timeout_s=HANG_S
    )
    assert values == ([NUMBER, NUMBER + 1], NUMBER)


@EACH
def test_a_loader_of_nbdist_uses_workers(cluster: Cluster, method: str) -> None:
    cell = f"""
mp.set_start_method("{method}", force=True)
class Samples(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return i * number, "mpi4py.MPI" in sys.modules
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter([(i * number, "mpi4py.MPI" in sys.modules)
                                     for i in range(8)])
for data in (Samples(), Stream()):
    values, joined = zip(*nbdist.loader(data, 1, shuffle=False, num_workers=1))
    assert [int(v) for v in values] == [rank * number, (4 + rank) * number], values
    # Another process with MPI would be another rank, or wait for one.
    assert all(bool(each) == ("{method}" == "fork") for each in joined)
mp.set_start_method(None, force=True)
"""
    for each in (SOME, cell):
        cluster.execute(each, ranks=[RANK], timeout_s=HANG_S)


# -- what returns ------------------------------------------------------------------


@EACH
def test_results_are_of_the_ranks_own_classes(cluster: Cluster, method: str) -> None:
    run(
        cluster,
        f"""
class Color(enum.Enum):
    RED = number
class Wrong(Exception): pass
def made():
    class Local: pass
    return Local
Local = made()
def wrong(): raise Wrong(number)
with mp.get_context("{method}").Pool(1) as pool:
    assert type(pool.apply(sample, (1,))) is Sample
    assert pool.apply(lambda: Color.RED) is Color.RED
    assert type(pool.apply(lambda: Local())) is Local
    assert pool.apply(lambda: Sample) is Sample
    try:
        pool.apply(wrong)
    except Wrong as error:
        assert error.args == (number,)
    else:
        raise AssertionError("no error")
    twice = pool.apply(lambda: lambda i: 2 * i * number)
    assert twice(1) == 2 * number
""",
    )


@EACH
def test_the_traceback_of_a_worker_shows_the_lines_of_the_cell(
    cluster: Cluster, method: str
) -> None:
    with pytest.raises(CellError) as raised:
        run(
            cluster,
            "import torch.multiprocessing as tmp\n"
            "def fail(index):\n"
            "    return {}[number]  # the line that fails\n"
            f"tmp.start_processes(fail, nprocs=1, start_method='{method}')",
        )
    text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(raised.value.rendered))
    assert f"KeyError: {NUMBER}" in text
    assert "return {}[number]  # the line that fails" in text


# -- what cannot arrive ------------------------------------------------------------

LOCKED = """
lock = threading.Lock()
def locked(i):
    with lock:
        return i
class Locked(Dataset):
    def __init__(self): self.lock = threading.Lock()
    def __len__(self): return 1
    def __getitem__(self, i): return i
"""


@UNFORKED
@pytest.mark.parametrize(
    "cell",
    [
        'mp.get_context("{method}").Process(target=locked).start()',
        'with mp.get_context("{method}").Pool(1) as pool: pool.map(locked, [1])',
        'next(iter(DataLoader(Locked(), num_workers=1, '
        'multiprocessing_context="{method}")))',
        'context = mp.get_context("{method}")\n'
        "with ProcessPoolExecutor(1, mp_context=context) as executor:\n"
        "    executor.submit(locked, 1).result()",
    ],
    ids=["Process", "Pool", "DataLoader", "ProcessPoolExecutor"],
)  # fmt: skip
def test_what_cannot_be_pickled_is_an_error_that_says_what_to_do(
    cluster: Cluster, method: str, cell: str
) -> None:
    with pytest.raises(
        CellError, match=r"cannot pickle .*lock.*make this object in the"
    ):
        run(cluster, LOCKED, cell.format(method=method))


# -- what a worker is --------------------------------------------------------------


@UNFORKED
def test_a_worker_imports_little(cluster: Cluster, method: str) -> None:
    shown = run(
        cluster,
        f"""
def loaded():
    return sorted(
        name for name in sys.modules
        if name.partition(".")[0] in ("IPython", "ipyparallel", "mpi4py", "nbdist")
    )
with mp.get_context("{method}").Pool(1) as pool:
    print(*pool.apply(loaded))
""",
    )
    assert set(shown.split()) == {
        "nbdist",
        "nbdist.lazy",
        "nbdist.ipc",
        *(
            f"nbdist.ipc.{name}"
            for name in (
                "keras_objects", "memory_regions", "own_memory", "serialization",
                "stacks", "worker_pickling",
            )
        ),
    }  # fmt: skip


def test_a_rank_forks_its_workers_unless_another_method_is_chosen(
    cluster: Cluster,
) -> None:
    run(
        cluster,
        "from multiprocessing import context\n"
        "before = mp.get_start_method(allow_none=True)\n"
        "mp.set_start_method(None, force=True)\n"
        "assert mp.get_start_method(allow_none=True) is None\n"
        "mp.set_start_method('spawn')\n"
        "mp.set_start_method(None, force=True)\n"
        "assert mp.get_start_method() == 'fork'\n"
        "mp.set_start_method(before, force=True)",
    )
