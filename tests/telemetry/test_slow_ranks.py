"""A training with one slow rank: the monitor names the rank, the cause and the line."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from nbdist import Cluster
from nbdist.clusters.futures import CallFuture
from nbdist.errors import CellInterrupted
from nbdist.widgets.slow_rank import slow_rank, splits_of
from tests.processes import wait_until
from tests.scripted_user import Scripted
from tests.seed import SEED

TRAINING = """
import subprocess, tempfile, time, torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, index):
        if {data} and rank == {rank}: time.sleep({seconds})
        return torch.full((64,), float(index % 7))

def spend(work):
    end = time.monotonic() + {seconds}
    while time.monotonic() < end: work()

disk, matrix, many = tempfile.TemporaryFile(), torch.ones(500, 500), torch.ones(2**22)
model = DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for rows in DataLoader(Rows(), batch_size=1, num_workers={workers}):
    optimizer.zero_grad()
    loss = model(rows).square().mean()
    {work}
    loss.backward()
    optimizer.step()
"""
IN_DATASET, IN_LOOP, IN_WORK = 9, 19, 22


class Cause(NamedTuple):
    """What makes a rank slow, and what the sentence says of it."""

    clause: str
    line: int
    work: str = "pass"
    """What the slow rank does in each step."""
    workers: int | None = None
    """The workers of the loader, if its data set is what is slow."""
    of_all: bool = False
    """Whether all ranks do the work."""


CAUSES = {
    "data": Cause("it waits for data", IN_DATASET, workers=0),
    "a worker's data": Cause("it waits for data", IN_LOOP, workers=1),
    "sleep": Cause("it sleeps", IN_WORK, "time.sleep({seconds})"),
    "Python": Cause("it computes", IN_WORK, "spend(lambda: sum(range(1000)))"),
    "torch": Cause("it computes", IN_WORK, "spend(lambda: matrix @ matrix)"),
    "a program": Cause(
        "it waits for a program or a connection",
        IN_WORK,
        "subprocess.run(['sleep', '{seconds}'])",
    ),
    "a disk": Cause(
        "it reads or writes files",
        IN_WORK,
        "spend(lambda: (disk.seek(0), torch.save(many, disk)))",
    ),
    "a debugger": Cause("it is in the debugger", IN_WORK, "breakpoint()"),
    "a collective": Cause(
        "the ranks communicate",
        IN_WORK,
        "for _ in range(20): nbdist.all_reduce(many)",
        of_all=True,
    ),
}
numbers = itertools.count(3)


@contextmanager
def running(cluster: Cluster, code: str, number: int) -> Iterator[CallFuture[Any]]:
    """Run a cell on the ranks, whose debugger waits for its user, until the end."""
    leaves = threading.Event()
    supervisor = cluster._live_supervisor()
    before = supervisor.reader
    supervisor.reader = Scripted().give(lambda: "quit" if leaves.wait(60) else "c")
    future = cluster.execute(code, number=number, wait=False)
    try:
        yield future
    finally:
        if supervisor.reader.prompts:
            leaves.set()
        else:
            future.interrupt()
        with pytest.raises(CellInterrupted):
            future.result(60)
        supervisor.reader = before


def assert_named(cluster: Cluster, rank: int, cause: Cause, seconds: float) -> None:
    """Train with a slow rank until the sentence is right, or fail.

    The numbers of cells differ, because the splits of the cell before are there for a
    second.
    """
    work = cause.work.format(seconds=seconds)
    code = TRAINING.format(
        rank=rank,
        seconds=seconds,
        data=cause.workers is not None,
        workers=cause.workers or 0,
        work=work if cause.of_all else f"if rank == {rank}: {work}",
    )
    number = next(numbers)
    why = rf"{cause.clause} \d+% of the time, at In\[{number}\] line {cause.line}"
    who = (
        rf"(rank {rank} takes .* as long as the others|the others wait for rank {rank})"
    )
    expected = why if cause.of_all else f"{who}: {why}"

    def sentence() -> str:
        splits = splits_of(cluster.collector.snapshot())
        return slow_rank(splits) if len(splits) == cluster.size else ""

    with running(cluster, code, number):
        wait_until(
            lambda: re.fullmatch(expected, sentence()) is not None, 100, sentence
        )


@pytest.mark.parametrize(
    ("rank", "cause"),
    [
        (0, "data"),
        (1, "a worker's data"),
        (1, "sleep"),
        (2, "Python"),
        (2, "torch"),
        (3, "a program"),
        (0, "a disk"),
        (3, "a debugger"),
        (0, "a collective"),
    ],
)
def test_the_slow_rank_and_its_cause_are_named(
    cluster: Cluster, rank: int, cause: str
) -> None:
    assert_named(cluster, rank, CAUSES[cause], 0.05)


DRAWS = 20


@pytest.mark.slow
def test_random_slow_ranks_are_named() -> None:
    draw = random.Random(SEED)
    sizes = sorted(draw.choices([2, 3, 4, 6], k=DRAWS))
    for size, draws in itertools.groupby(sizes):
        with Cluster(size, device="cpu") as cluster:
            for _ in draws:
                rank, seconds = draw.randrange(size), draw.uniform(0.03, 0.2)
                cause = draw.choice(list(CAUSES))
                print(f"{cause} on rank {rank} of {size}, {seconds:.3f} s")
                assert_named(cluster, rank, CAUSES[cause], round(seconds, 3))
