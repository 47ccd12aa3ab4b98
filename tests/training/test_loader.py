"""A loader gives every sample to one rank in each epoch, and measures the waits.

The ranks of a world are simulated here. tests/training/test_on_ranks.py has real ranks.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from nbdist.engine import start_method
from nbdist.errors import UsageError
from nbdist.telemetry import internal_metrics
from nbdist.training.data import device_prefetch
from nbdist.training.data import loader as loaders
from nbdist.training.data.loader import Loader, loader
from tests.processes import HANG_S, Program, runs, wait_until

SIZES = st.integers(1, 8)


@pytest.fixture(autouse=True, scope="module")
def _forks() -> Iterator[None]:
    """Workers are forked, as on a rank: elsewhere Python 3.14 has another default."""
    with start_method.pythons_own():
        start_method.prefer_fork()
        yield


class Numbers(Dataset):
    """Sample i is the number i. Samples are fetched one by one."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index >= self.length:
            raise IndexError(index)
        return index


class Stream(IterableDataset):
    """The numbers below `length`. It can divide them among its workers."""

    def __init__(self, length: int, *, divides: bool = False) -> None:
        self.length, self.divides = length, divides
        self.epochs: list[int] = []

    def __iter__(self):
        info = get_worker_info()
        step = info.num_workers if info and self.divides else 1
        return iter(range(info.id if step > 1 else 0, self.length, step))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def world(size: int, dataset, *args, **options) -> list[Loader]:
    """The loaders of all ranks of a world."""
    return [
        loader(dataset, *args, group=SimpleNamespace(rank=rank, size=size), **options)
        for rank in range(size)
    ]


def hand_out(loaders: list[Loader], steps: int | None = None) -> list[list[list[int]]]:
    """Take steps on all ranks. Returns each rank's samples in each step."""
    batches = zip(*loaders, strict=True)
    return [
        [part.tolist() for part in parts]
        for parts in itertools.islice(batches, steps)
    ]  # fmt: skip


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [sample for parts in steps for part in parts for sample in part]


@settings(max_examples=40)
@given(SIZES, SIZES, st.integers(0, 90), st.integers(1, 7), st.integers(0, 4))
def test_every_sample_is_taken_once_an_epoch_after_a_resize(
    before, after, length, batch_size, steps
):
    for dataset in (Numbers(length), Stream(length)):
        first = world(before, dataset, batch_size)
        first_part = flat(hand_out(first, steps))
        state = first[0].state_dict()
        assert all(each.state_dict() == state for each in first)
        resized = world(after, dataset, global_batch_size=before * batch_size, seed=5)
        for each in resized:
            each.load_state_dict(state)
        rest = flat(hand_out(resized)) if len(first_part) < length or not steps else []
        assert sorted(first_part + rest) == list(range(length))


@settings(max_examples=20)
@given(SIZES, st.integers(0, 60), st.integers(1, 30), st.booleans())
def test_the_weight_of_a_part_is_its_number_of_samples(
    size, length, together, drop_last
):
    for dataset in (Numbers(length), Stream(length)):
        ranks = world(size, dataset, global_batch_size=together, drop_last=drop_last)
        for parts in zip(*ranks, strict=True):
            total = sum(map(len, parts))
            assert not drop_last or total == together
            for rank, part in zip(ranks, parts, strict=True):
                assert rank.weight == pytest.approx(len(part) * size / total)
            # DDP averages the ranks' weighted means in this way.
            means = [
                rank.average(part.double()) / size
                for rank, part in zip(ranks, parts, strict=True)
            ]
            whole = torch.cat(list(parts)).double().mean()
            torch.testing.assert_close(sum(means), whole)


def test_the_order_depends_on_the_seed_and_the_epoch():
    first, second = (world(2, Numbers(20), 3, seed=4) for _ in range(2))
    epochs = [hand_out(first) for _ in range(3)]
    assert [hand_out(second) for _ in range(3)] == epochs
    assert len({tuple(flat(epoch)) for epoch in epochs}) == 3
    assert hand_out(world(2, Numbers(20), 3, seed=5)) != epochs[0]
    third = world(2, Numbers(20), 3, seed=4)
    for rank in third:
        rank.set_epoch(2)
    assert hand_out(third) == epochs[2]
    assert [len(rank) for rank in third] == [4, 4]


def test_a_loop_continues_where_it_was_left():
    ranks = world(1, Numbers(10), 3, shuffle=False)
    assert flat(hand_out(ranks, 2)) == [0, 1, 2, 3, 4, 5]
    assert flat(hand_out(ranks)) == [6, 7, 8, 9]
    assert ranks[0].sampler.epoch == 1


def test_a_copy_for_a_rank_that_joins_continues_there():
    batches = loader(torch.arange(12), 2, shuffle=False, num_workers=0)
    loop = iter(batches)
    assert next(loop).tolist() == [0, 1]
    copy = pickle.loads(pickle.dumps(batches))
    assert next(iter(copy)).tolist() == next(loop).tolist() == [2, 3]


@pytest.mark.parametrize("dataset", [Numbers(7), Stream(7)])
def test_with_join_a_rank_without_samples_ends_early(dataset):
    steps = [list(rank) for rank in world(3, dataset, 2, shuffle=False, join=True)]
    assert [len(batches) for batches in steps] == [2, 1, 1]
    samples = torch.cat([torch.cat(batches) for batches in steps])
    assert sorted(samples.tolist()) == list(range(7))
    assert not world(3, dataset, 2)[1].waits.steps


@pytest.mark.parametrize(
    "dataset", [[torch.full((2,), i) for i in range(5)], iter([])], ids=["map", "iter"]
)
def test_ready_batches_go_to_one_rank_each(dataset):
    if not isinstance(dataset, list):
        batches = [torch.full((2,), i) for i in range(5)]
        ranks = [world(2, iter(batches))[rank] for rank in range(2)]
    else:
        ranks = world(2, dataset, shuffle=False)
    steps = hand_out(ranks)
    assert steps == [[[0, 0], [1, 1]], [[2, 2], [3, 3]], [[4, 4], []]]


def test_a_tensor_dataset_is_fetched_as_by_torch():
    x, y = torch.randn(11, 3), torch.arange(11)
    fast = loader(TensorDataset(x, y), 4, seed=1)
    slow = loader([(x[i], y[i]) for i in range(11)], 4, seed=1)
    for (xs, ys), (xs_slow, ys_slow) in zip(fast, slow, strict=True):
        assert torch.equal(xs, xs_slow)
        assert torch.equal(ys, ys_slow)


@pytest.mark.parametrize("divides", [False, True])
def test_workers_do_not_change_the_batches(divides):
    numbers = [
        hand_out(world(2, Numbers(23), 4, num_workers=workers)) for workers in (0, 2)
    ]
    assert numbers[0] == numbers[1]
    stream = Stream(23, divides=divides)
    streams = [hand_out(world(2, stream, 4, num_workers=n)) for n in (0, 3)]
    assert streams[0] == streams[1]
    assert stream.epochs == [1, 1, 1, 1]


class Stuck(Numbers):
    """Fetching the first worker's third batch never ends."""

    def __getitem__(self, index: int) -> int:
        if index >= 8:
            time.sleep(3600)
        return index


def test_workers_end_at_once_when_a_loop_is_left(monkeypatch: pytest.MonkeyPatch):
    # torch alone waits for each as long.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 3600.0)
    me = psutil.Process()
    before = set(me.children())
    stuck = loader(Stuck(40), 4, shuffle=False, num_workers=2)
    batches = iter(stuck)
    assert next(batches).tolist() == [0, 1, 2, 3]
    workers = set(me.children()) - before
    assert len(workers) == 2
    batches.close()
    _, living = psutil.wait_procs(workers, timeout=HANG_S)
    assert not living


def test_the_next_loop_ends_a_loop_that_an_error_keeps_alive():
    numbers = loader(Numbers(40), 4, num_workers=1)
    left = iter(numbers)  # as a traceback would hold it
    next(left)
    next(iter(numbers))
    with pytest.raises(StopIteration):
        next(left)


def test_an_error_of_the_data_names_its_worker_and_line():
    class Bad(Numbers):
        def __getitem__(self, index: int) -> int:
            raise ValueError(f"sample {index} is bad")

    with pytest.raises(ValueError, match=r"worker process 0[\s\S]*is bad"):
        next(iter(loader(Bad(9), 3, num_workers=1)))


RANK_WITH_WORKERS = """
import multiprocessing, os, sys, time, torch
from nbdist.training.data.loader import loader
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index):
        os.write(1, f"{os.getpid()}\\n".encode())  # one write: two workers share it
        time.sleep(3600)
if __name__ == "__main__":
    multiprocessing.set_start_method("{method}")
    next(iter(loader(Slow(), 4, num_workers=2)))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_die_with_their_rank(method: str, tmp_path: Path):
    script = tmp_path / "rank.py"  # what an unforked worker imports
    script.write_text(RANK_WITH_WORKERS.replace("{method}", method))
    with Program(
        f"import runpy; runpy.run_path({str(script)!r}, None, '__main__')"
    ) as rank:
        workers = [psutil.Process(int(rank.line())) for _ in range(2)]
        rank.kill()
        # torch's workers look for their parent between samples, and these have one for
        # an hour.
        wait_until(lambda: not any(map(runs, workers)))


def test_waiting_is_counted_and_recorded():
    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.01)
            return index

    class Recorded(list):
        def record_internal(self, **scalars):
            self.append(scalars)

        def count_batches(self, done, total):
            progress.append((done, total))

    progress: list[tuple[int, int]] = []
    recorded = Recorded()
    internal_metrics.set_recorder(recorded)
    try:
        numbers = loader(Slow(6), 2, num_workers=0)
        for _ in numbers:
            time.sleep(0.03)
    finally:
        internal_metrics.set_recorder(None)
    waits = numbers.waits
    assert waits.steps == len(recorded) == 3
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert waits.waited_s == pytest.approx(sum(r["data_wait_s"] for r in recorded))
    assert waits.total_s == pytest.approx(sum(r["step_s"] for r in recorded))
    assert 0.06 <= waits.waited_s < waits.total_s - 0.09 + 1e-3
    assert "3 steps in 0." in str(waits)
    assert waits.share == waits.waited_s / waits.total_s
    waits.clear()
    assert waits.steps == 0


@pytest.mark.parametrize(
    ("cores", "ranks_here", "dataset", "expected"),
    [
        (2, "4", Numbers(9), 0),
        (4, "4", Numbers(9), 0),
        (8, "4", Numbers(9), 1),
        (64, "4", Numbers(9), 4),
        (64, "4", Stream(9), 1),
        (64, "", Numbers(9), 4),
        (64, "4", TensorDataset(torch.zeros(9)), 0),
    ],
)
def test_auto_uses_the_cores_that_are_left(
    monkeypatch, cores, ranks_here, dataset, expected
):
    monkeypatch.setattr(loaders, "cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
    assert loader(dataset, 3).num_workers == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"batch_size": 0}, "batch_size=0: expected a whole number, 1 or more"),
        ({"batch_size": 2, "global_batch_size": 8}, "pass one of them"),
        ({"batch_size": 2, "num_workers": "many"}, "num_workers='many'.* or \"auto\""),
        ({"batch_size": 2, "prefetch": 0}, "prefetch=0"),
        ({"batch_size": 2, "pin_memory": "yes"}, 'True, False or "auto"'),
        ({"batch_size": 2, "seed": -1}, "seed=-1"),
    ],
)
def test_invalid_arguments_of_a_loader_are_refused(arguments, says):
    with pytest.raises(UsageError, match=says):
        loader(Numbers(9), **arguments)


def test_a_batch_without_samples_keeps_its_structure():
    Point = namedtuple("Point", "x name")
    batch = {
        "x": torch.ones(1, 3),
        "names": ["a"],
        "pairs": [torch.ones(1), np.ones((1, 2))],
        "point": Point(torch.ones(1, 4), ("b",)),
        "step": 7,
    }
    empty = loaders._emptied(batch)
    assert empty["x"].shape == (0, 3)
    assert empty["names"] == []
    assert [tuple(each.shape) for each in empty["pairs"]] == [(0,), (0, 2)]
    assert empty["point"].x.shape == (0, 4)
    assert empty["point"].name == ()
    assert empty["step"] == 7


def test_batches_move_with_their_containers():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = OrderedDict(a=torch.ones(2), b=(torch.ones(1), ["text"]), c=packed)
    moved = device_prefetch._moved(batch, torch.float64)
    assert isinstance(moved, OrderedDict)
    assert moved["a"].dtype == moved["b"][0].dtype == torch.float64
    assert moved["b"][1] == ["text"]
    assert isinstance(moved["c"], PackedSequence)


@pytest.mark.streams
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_batches_are_copied_to_a_gpu_during_the_step():
    x = torch.randn(64, 1 << 16)
    numbers = loader(TensorDataset(x), 8, shuffle=False, seed=0)
    assert numbers.device.type == "cuda"
    for step, (rows,) in enumerate(numbers):
        assert rows.is_cuda
        busy = rows @ rows.T  # keeps the stream busy while the next one is copied
        assert torch.equal(rows.cpu(), x[8 * step : 8 * step + 8])
        assert busy.shape == (8, 8)
    pinned = loader(list(x), 8, num_workers=1)
    assert sum(len(rows) for rows in pinned) == 64
