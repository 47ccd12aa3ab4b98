"""Cells that leave anything in flight, drawn at random, and then a cell that is right.

A failure names its seed: `draw(seed)` gives the same cells again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from nbdist import Cluster
from nbdist.clusters.futures import CallFuture
from nbdist.clusters.result import CellResult
from nbdist.errors import CellError
from tests.seed import SEED

DEADLOCK_S = 10
"""Ranks whose drawn calls wait for each other end then."""
ASYNC = [
    "dist.all_reduce(torch.ones(N), async_op=True, group=group)",
    "dist.broadcast(torch.ones(N), first, async_op=True, group=group)",
    "dist.reduce(torch.ones(N), first, async_op=True, group=group)",
    "dist.barrier(async_op=True, group=group)",
    "dist.all_gather_into_tensor(torch.ones(N * size), torch.ones(N), async_op=True, "
    "group=group)",
    "dist.all_to_all_single(torch.ones(N * size), torch.ones(N * size), "
    "async_op=True, group=group)",
    "dist.isend(torch.ones(N), after, tag=tag, group=group)",
    "dist.irecv(torch.ones(N), before, tag=tag, group=group)",
    "dist.irecv(torch.ones(N), tag=tag, group=group)",
    "dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(N), after, tag=tag, "
    "group=group), dist.P2POp(dist.irecv, torch.ones(N), before, tag=tag, "
    "group=group)])",
]
OURS = [
    "dist.reduce_scatter_tensor(torch.ones(N), torch.ones(N * size), async_op=True, "
    "group=group)",
    "functional.all_reduce(torch.ones(N), 'sum', group or dist.group.WORLD)",
    "dist.send(torch.ones(N), after, tag=tag, group=group)",
    "dist.send_object_list(['old'], after, group=group)",
    "dist.all_reduce(torch.ones(N), group=group)",
    "dist.barrier(group=group)",
    "dist.monitored_barrier(group)",
    "dist.recv(torch.ones(N), before, tag=tag, group=group)",
]
NBDIST = [
    "nbdist.send(torch.ones(N), after, tag=tag)",
    "nbdist.all_reduce(torch.ones(N), async_op=True)",
    "nbdist.broadcast(torch.ones(N), src=first, async_op=True)",
]
HOROVOD = [
    "hvd.allreduce_async(torch.ones(N), name='g')",
    "hvd.allreduce_async(torch.ones(N))",
    "hvd.broadcast_async(torch.ones(N), 0, name='b')",
    "hvd.allgather_async(torch.ones(N))",
    "hvd.allreduce(torch.ones(N), name='g')",
    "hvd.grouped_allreduce_async([torch.ones(N), torch.ones(2)], name='many')",
]
GROUPS = {
    "default": ("None", [*ASYNC, *OURS, *NBDIST]),
    "sub": ("dist.new_group(ranks)", [*ASYNC, *OURS]),
    "gloo": ("dist.new_group(ranks, backend='gloo')", ASYNC),
    "horovod": ("None", HOROVOD),
}
FAILURES = [
    "exception", "all", "exit", "interrupt", "timeout", "background", "subset", "none",
]  # fmt: skip
WEIGHTS = [6, 3, 3, 1, 1, 3, 3, 3]

SETUP = """
import functools, time
import torch.distributed._functional_collectives as functional
import nbdist.horovod as hvd
if not hvd.is_initialized(): hvd.init()
hvd.allreduce(torch.ones(1), name='first')
ended = []
"""
RIGHT = """
def check():
    sums, n = [], len(ranks)
    for step in range(1, 5):
        t = torch.full((N,), float(step)); dist.all_reduce(t, group=group)
        sums.append(t[0].item())
    assert sums == [n * 1., n * 2., n * 3., n * 4.], sums
    for value in (2., 3.):
        x = torch.zeros(N)
        mine = torch.full((N,), value + rank)
        works = [dist.isend(mine, after, tag=tag, group=group)]
        works += [dist.irecv(x, before, tag=tag, group=group)]
        for work in works: work.wait()
        assert x[0].item() == value + before, (x[0].item(), value + before)
    if rank in ranks[:2] and name != 'gloo':
        found = [None]
        if rank == first: dist.send_object_list(['new'], after, group=group)
        else: dist.recv_object_list(found, first, group=group); assert found == ['new']
def check_horovod():
    for value in (5., 6.):
        for label in ('g', None):
            got = hvd.allreduce(torch.full((N,), value), name=label, op=hvd.Sum)
            assert got[0].item() == value * world_size, (label, got[0].item())
        got = hvd.broadcast(torch.full((N,), value + rank), 0, name='b')
        assert got[0].item() == value, got[0].item()
if rank in ranks: check()
check_horovod()
"""


@dataclass(frozen=True)
class Draw:
    """One cell that leaves something, and how it ends."""

    size: int
    """Of the world."""
    setup: str
    cell: str
    failure: str
    chosen: tuple[int, ...]
    """The ranks that get the cell."""


def draw(seed: int, size: int) -> Draw:
    chance = random.Random(seed)
    name = chance.choice(list(GROUPS))
    made, operations = GROUPS[name]
    all_ranks = list(range(size))
    ranks = all_ranks
    if name in ("sub", "gloo") and size > 2 and chance.random() < 0.5:
        ranks = sorted(chance.sample(all_ranks, chance.choice([2, 3])))
    failure = chance.choices(FAILURES, WEIGHTS)[0]
    chosen = all_ranks
    if failure == "subset" or (failure == "background" and chance.random() < 0.5):
        chosen = sorted(chance.sample(all_ranks, chance.randrange(1, size + 1)))
    failing = {chance.choice(chosen)}
    if failure not in ("exception", "exit"):
        failing = set(chosen)
    setup = f"""
name, ranks, N, tag = {name!r}, {ranks}, {chance.choice([1, 4, 1000])}, \
{chance.choice([0, 3])}
group, size, first = {made}, {len(ranks)}, {ranks[0]}
if rank in ranks:
    at = ranks.index(rank)
    after, before = ranks[(at + 1) % size], ranks[at - 1]
"""
    lines = ["kept = []"]
    for _ in range(chance.randrange(1, 4)):
        who = sorted(chance.sample(ranks, chance.randrange(1, len(ranks) + 1)))
        lines.append(f"if rank in {who}: kept.append({chance.choice(operations)})")
    if chance.random() < 0.3 and name != "gloo":  # gloo drops the message's buffer
        lines.append("kept = None")
    ends = {"exit": "raise SystemExit(2)", "none": "pass"}
    ends |= dict.fromkeys(("interrupt", "timeout"), "time.sleep(600)")
    end = ends.get(failure, "raise ValueError('drawn')")
    lines.append(f"if rank in {sorted(failing)}: {end}")
    return Draw(size, setup, "\n".join(lines), failure, tuple(chosen))


def run(cluster: Cluster, seed: int) -> None:
    drawn = draw(seed, cluster.size)
    cluster.execute(drawn.setup, timeout_s=60)
    try:
        if drawn.failure in ("background", "interrupt"):
            call = cluster.execute(
                drawn.cell, drawn.chosen, wait=False, timeout_s=DEADLOCK_S
            )
            if drawn.failure == "interrupt":
                await_cell(cluster, drawn.chosen, call)
                call.interrupt()
            call.result(60)
        else:
            limit_s = 1 if drawn.failure == "timeout" else DEADLOCK_S
            cluster.execute(drawn.cell, drawn.chosen, timeout_s=limit_s)
    except CellError:
        pass
    else:
        if drawn.failure != "none":
            raise AssertionError("the cell has not failed")
        # What a good cell has left stays, until a cell fails that leaves more.
        more = "if rank == 0: dist.send(torch.ones(1), 1, tag=9)\n1 / 0"
        with pytest.raises(CellError):
            cluster.execute(more, timeout_s=60)
    cluster.execute(RIGHT, timeout_s=60)
    # Each renewal renews all groups. gloo's destructor would wait for different calls
    # that are of equal number, which no count can tell.
    cluster.execute(
        "if group is not None and rank in ranks:\n"
        "    ended.append(group); dist.destroy_process_group(group)"
    )


def await_cell(
    cluster: Cluster, ranks: tuple[int, ...], call: CallFuture[CellResult]
) -> None:
    """Wait until each of these ranks is in a line of the cell, or it has failed."""
    end = time.monotonic() + 60
    while not call.done() and time.monotonic() < end:
        stacks = cluster.stacks()
        if all("In[" in (stacks[rank] or "") for rank in ranks):
            return
    assert call.done(), f"the cell does not begin: {cluster.stacks()}"


def run_many(cluster: Cluster, first: int, count: int) -> None:
    cluster.execute(SETUP, timeout_s=60)
    before, cluster.on_note = cluster.on_note, lambda _note: None
    try:
        for seed in range(first, first + count):
            try:
                run(cluster, seed)
            except Exception as error:
                drawn = draw(seed, cluster.size)
                raise AssertionError(
                    f"seed {seed} on {cluster.size} ranks: {drawn.failure} on "
                    f"{drawn.chosen}\n{drawn.setup}\n{drawn.cell}"
                ) from error
    finally:
        cluster.on_note = before


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with Cluster(2, device="cpu") as cluster:
        yield cluster


def test_what_any_cell_leaves_on_four_ranks_meets_no_later_call(
    cluster: Cluster,
) -> None:
    run_many(cluster, SEED, 20)


def test_what_any_cell_leaves_on_two_ranks_meets_no_later_call(two: Cluster) -> None:
    run_many(two, SEED, 10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(10))
def test_what_many_cells_leave_on_four_ranks_meets_no_later_call(
    cluster: Cluster, part: int
) -> None:
    run_many(cluster, SEED + 35 * part, 35)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(10))
def test_what_many_cells_leave_on_two_ranks_meets_no_later_call(
    two: Cluster, part: int
) -> None:
    run_many(two, SEED + 15 * part, 15)
