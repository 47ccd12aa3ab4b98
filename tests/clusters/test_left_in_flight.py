"""What a cell leaves in flight meets no operation of the next cell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdist import Cluster
from nbdist.errors import CellError, CellInterrupted, CellTimeout
from nbdist.ipc.left_over import describe, left_over
from nbdist.wire import Begun, Tally

FAILS = "\nelse: raise ValueError('typo')"
LOOP = """
sums = []
for step in range(1, 5):
    t = torch.full((1000,), float(step)); dist.all_reduce(t, group=group)
    sums.append(t[0].item())
print(sums)
"""
PAIR = """
x = torch.zeros(4)
for value in (2., 3.):
    if rank == 0: dist.send(torch.full((4,), value), 1, group=group, tag=tag)
    if rank == 1:
        dist.recv(x, 0, group=group, tag=tag); assert x[0] == value, x
print("right")
"""
GROUPS = {
    "default": "group = None",
    "sub": "group = dist.new_group([0, 1, 2, 3])",
    "gloo": "group = dist.new_group([0, 1, 2, 3], backend='gloo')",
}


@pytest.fixture
def notes(cluster: Cluster) -> Iterator[list[str]]:
    told: list[str] = []
    before, cluster.on_note = cluster.on_note, told.append
    yield told
    cluster.on_note = before


def outputs(cluster: Cluster, code: str) -> list[str]:
    return [each.stdout for each in cluster.execute(code, timeout_s=60)]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    "begin",
    [
        "dist.all_reduce(torch.ones(1000), async_op=True, group=group)",
        "dist.broadcast(torch.ones(1000), 0, async_op=True, group=group)",
        "dist.barrier(async_op=True, group=group)",
    ],
)
def test_an_async_call_of_a_failed_cell_joins_no_later_call(
    cluster: Cluster, group: str, begin: str
) -> None:
    cluster.execute(GROUPS[group])
    with pytest.raises(CellError, match="typo"):
        cluster.execute(f"if rank == 0: w = {begin}{FAILS}", timeout_s=60)
    assert outputs(cluster, LOOP) == ["[4.0, 8.0, 12.0, 16.0]\n"] * 4


def test_the_wait_for_a_cancelled_call_names_it_and_the_cell(cluster: Cluster) -> None:
    code = f"if rank == 0: w = dist.all_reduce(torch.ones(9), async_op=True){FAILS}"
    with pytest.raises(CellError):
        cluster.execute(code, number=7)
    cluster.execute("pass")
    with pytest.raises(
        CellError, match=r"all_reduce of In\[7\] line 1 was cancelled.*In\[7\] has fail"
    ):
        cluster.execute("if rank == 0: w.wait()")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    "begin",
    [
        "if rank == 0: w = dist.isend(torch.ones(4), 1, group=group, tag=tag)",
        "if rank == 1: w = dist.irecv(torch.ones(4), 0, group=group, tag=tag)",
        "if rank == 1: w = dist.irecv(torch.ones(4), group=group, tag=tag)",
        "if rank == 0: w = dist.batch_isend_irecv([dist.P2POp(dist.isend, "
        "torch.ones(4), 1, group=group, tag=tag)])",
        "if rank == 0 and group is None: nbdist.send(torch.ones(4), 1, tag=tag)",
    ],
)
def test_a_message_of_a_failed_cell_meets_no_later_message(
    cluster: Cluster, group: str, begin: str
) -> None:
    cluster.execute(GROUPS[group] + "\ntag = 3")
    with pytest.raises(CellError, match="typo"):
        cluster.execute(f"{begin}\nif rank > 1: raise ValueError('typo')")
    assert outputs(cluster, PAIR) == ["right\n"] * 4


def test_an_object_of_a_failed_cell_is_not_received_later(cluster: Cluster) -> None:
    with pytest.raises(CellError):
        cluster.execute("if rank == 0: dist.send_object_list(['old'], 1)" + FAILS)
    code = "found = [None]\nif rank == 0: dist.send_object_list(['new'], 1)\n"
    code += "if rank == 1: dist.recv_object_list(found, 0)\nprint(found)"
    assert outputs(cluster, code)[1] == "['new']\n"


@pytest.mark.parametrize(
    "fail",
    ["raise SystemExit(3)", "raise KeyboardInterrupt", "exit()", "assert False"],
)
def test_it_matters_not_how_the_cell_has_failed(cluster: Cluster, fail: str) -> None:
    code = "group, tag = None, 0\nif rank == 0: dist.send(torch.ones(4), 1)\n"
    with pytest.raises((CellError, CellInterrupted)):
        cluster.execute(f"{code}else: {fail}")
    assert outputs(cluster, PAIR) == ["right\n"] * 4


def test_nothing_is_left_of_a_cell_whose_time_is_up(cluster: Cluster) -> None:
    code = "import time\ngroup, tag = None, 0\n"
    code += "if rank == 0: dist.send(torch.ones(4), 1)\nelse: time.sleep(600)"
    with pytest.raises(CellTimeout):
        cluster.execute(code, timeout_s=2)
    assert outputs(cluster, PAIR) == ["right\n"] * 4


def test_nothing_is_left_of_a_failed_background_cell_on_some_ranks(
    cluster: Cluster,
) -> None:
    cluster.execute("group, tag = None, 0")
    code = "if rank == 0: dist.send(torch.ones(4), 1)" + FAILS
    with pytest.raises(CellError):
        cluster.execute(code, ranks=[0, 2], wait=False).result(60)
    assert outputs(cluster, PAIR) == ["right\n"] * 4


@pytest.mark.parametrize("name", ["name='g'", "name=None"])
def test_a_call_of_horovod_in_a_failed_cell_joins_no_later_call(
    cluster: Cluster, name: str
) -> None:
    cluster.execute(
        "import nbdist.horovod as hvd; hvd.init(); hvd.allreduce(torch.ones(1))"
    )
    with pytest.raises(CellError, match="typo"):
        cluster.execute(
            f"if rank == 0: h = hvd.allreduce_async(torch.ones(4), {name})" + FAILS
        )
    code = f"print(hvd.allreduce(torch.full((4,), 5.), {name}).tolist())"
    assert outputs(cluster, code) == ["[5.0, 5.0, 5.0, 5.0]\n"] * 4
    with pytest.raises(CellError, match=r"allreduce.* of .*line 1 was cancelled"):
        cluster.execute("if rank == 0: hvd.synchronize(h)")


def test_optimizers_of_horovod_agree_on_their_numbers_again(cluster: Cluster) -> None:
    """A failed cell has used one more optimizer on some ranks."""
    cluster.execute(
        """
import nbdist.horovod as hvd; hvd.init(); hvd.allreduce(torch.ones(1))
def trained():
    torch.manual_seed(0); net = torch.nn.Linear(3, 1)
    own = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1))
    net(torch.full((2, 3), rank + 1.)).sum().backward(); own.step()
    return net.weight.tolist()
"""
    )
    with pytest.raises(CellError, match="typo"):
        cluster.execute("if rank == 0: trained()" + FAILS, timeout_s=60)
    assert len(set(outputs(cluster, "print(trained())"))) == 1


def test_a_pipeline_whose_last_stage_has_failed_computes_the_next_step(
    cluster: Cluster,
) -> None:
    cluster.execute(
        """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
torch.manual_seed(0); part = torch.nn.Linear(4, 4)
fails = True
def loss(out, target):
    if fails: raise ValueError('wrong loss')
    return (out - target).square().mean()
stage = PipelineStage(part, rank, 4, torch.device('cpu'))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss)
def step(k):
    if rank == 0: return schedule.step(torch.full((8, 4), float(k)))
    if rank < 3: return schedule.step()
    return schedule.step(target=torch.zeros(8, 4), losses=[])
""",
        timeout_s=60,
    )
    with pytest.raises(CellError, match="wrong loss"):
        cluster.execute("step(1)", timeout_s=60)
    cluster.execute("fails = False\nmade = step(2)", timeout_s=60)
    code = "x = torch.full((8, 4), 2.)\nfor _ in range(4): x = part(x)\n"
    cluster.execute(code + "if rank == 3: torch.testing.assert_close(made, x)")


def test_a_lone_call_of_a_good_cell_is_told_and_stays(
    cluster: Cluster, notes: list[str]
) -> None:
    cluster.execute(
        "t = torch.ones(2)\nif rank == 0: w = dist.all_reduce(t, async_op=True)",
        number=5,
    )
    assert len(notes) == 1
    assert "In[5] has left in flight: rank 0's all_reduce of In[5] line 2" in notes[0]
    assert "rank 1-3 has not called" in notes[0]
    code = "w.wait() if rank == 0 else dist.all_reduce(t)\nprint(t.tolist())"
    assert outputs(cluster, code) == ["[4.0, 4.0]\n"] * 4
    assert len(notes) == 1


def test_a_message_that_was_kept_for_a_later_cell_arrives() -> None:
    """Also if a cell between them fails that has nothing to do with it.

    The shared cluster does not do: after a failed cell, what its earlier tests have
    left, such as Horovod, begins again on renewed groups.
    """
    notes: list[str] = []
    with Cluster(2) as cluster:
        cluster.on_note = notes.append
        cluster.execute("if rank == 0: dist.send(torch.full((4,), 7.), 1)", ranks=[0])
        assert len(notes) == 1
        assert "rank 0's send to 1, which rank 1 has not received" in notes[0]
        with pytest.raises(CellError):
            cluster.execute("dist.barrier(); 1 / 0")
        code = "x = torch.zeros(4)\ndist.recv(x, 0)\nprint(x.tolist())"
        assert cluster.execute(code, ranks=[1])[1].stdout == "[7.0, 7.0, 7.0, 7.0]\n"
        assert len(notes) == 1


def test_calls_that_all_ranks_have_begun_are_neither_told_nor_cancelled(
    cluster: Cluster, notes: list[str]
) -> None:
    cluster.execute(
        """
t, x = torch.ones(2), torch.zeros(2)
works = [dist.all_reduce(t, async_op=True)]
works += [dist.isend(torch.full((2,), float(rank)), (rank + 1) % 4)]
works += [dist.irecv(x)]
"""
    )
    with pytest.raises(CellError):
        cluster.execute("1 / 0")
    code = "for w in works: w.wait()\nprint(t.tolist(), x.tolist())"
    left = [f"[4.0, 4.0] [{(r - 1) % 4}.0, {(r - 1) % 4}.0]\n" for r in range(4)]
    assert outputs(cluster, code) == left
    assert notes == []


def test_an_error_of_an_async_call_fails_its_cell_if_nobody_waits(
    cluster: Cluster,
) -> None:
    code = "w = dist.all_reduce(torch.ones(rank + 1), async_op=True)"
    with pytest.raises(CellError, match=r"In\[4\] line 1: CollectiveMismatch"):
        cluster.execute(code, number=4)
    assert outputs(cluster, "group = None" + LOOP)[0] == "[4.0, 8.0, 12.0, 16.0]\n"


def test_a_late_error_of_a_failed_cell_does_not_fail_the_next(cluster: Cluster) -> None:
    """Rank 0 fails before rank 1 makes the other call."""
    with pytest.raises(CellError, match="typo"):
        cluster.execute(
            """
import time
w = dist.all_reduce(torch.ones(rank + 1), async_op=True) if rank < 3 else None
if rank == 0: raise ValueError('typo')
if rank == 3: time.sleep(1); w = dist.all_reduce(torch.ones(9), async_op=True)
"""
        )
    cluster.execute("pass")


def begin_different_calls() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(dist.get_rank() + 1), async_op=True)


def test_an_error_of_an_async_call_fails_its_function_if_nobody_waits(
    cluster: Cluster,
) -> None:
    with pytest.raises(CellError, match="different collectives"):
        cluster.run(begin_different_calls)


def test_an_error_of_an_async_call_that_was_caught_fails_no_cell(
    cluster: Cluster,
) -> None:
    cluster.execute(
        """
w = dist.all_reduce(torch.ones(rank + 1), async_op=True)
try: w.wait()
except Exception as error: print(error)
"""
    )
    cluster.execute(
        """
f = dist.all_reduce(torch.ones(rank + 1), async_op=True).get_future()
try: f.wait()
except Exception as error: print(error)
"""
    )


# -- the comparison --------------------------------------------------------------------

ONE, TWO = 5 << 32 | 1, 9 << 32 | 1


def tables(*tallies: Tally | None) -> dict[int, dict[str, Tally]]:
    return {
        rank: {} if tally is None else {"0/0": tally}
        for rank, tally in enumerate(tallies)
    }


def test_a_missing_tally_is_one_of_nothing() -> None:
    (found,) = left_over(tables(Tally((0, 1), 1), None))
    assert (found.ahead, found.behind, found.calls) == ((0,), (1,), 1)


def test_receives_from_any_rank_match_what_was_sent() -> None:
    sent = Tally((0, 1), 0, [(1, ONE)])
    assert left_over(tables(sent, Tally((0, 1), 0, from_any=ONE))) == []
    assert left_over(tables(sent, Tally((0, 1), 0, from_any=TWO))) != []
    assert left_over(tables(sent, Tally((0, 1), 0, (), [(0, ONE)]))) == []
    (found,) = left_over(tables(sent, Tally((0, 1), 0, (), [(0, TWO)])))
    assert found.calls == 0
    assert describe(found, {}) == "different calls of rank 0 and rank 1"


def test_only_members_are_compared() -> None:
    assert left_over(tables(Tally((0, 1), 3), Tally((0, 1), 3), None)) == []


def test_the_description_names_the_last_calls() -> None:
    (found,) = left_over(tables(Tally((0, 1), 3), Tally((0, 1), 1)))
    begun = [Begun("0/0", n, f"all_reduce of line {n}", None) for n in (1, 2, 3)]
    text = describe(found, {0: begun})
    assert text == (
        "rank 0's all_reduce of line 2, all_reduce of line 3, "
        "which rank 1 has not called"
    )


def test_a_gloo_group_with_a_cancelled_call_can_be_dropped(cluster: Cluster) -> None:
    cluster.execute(GROUPS["gloo"])
    begin = (
        "if rank == 0: dist.all_reduce(torch.ones(1000), async_op=True, group=group)"
    )
    with pytest.raises(CellError):
        cluster.execute(begin + FAILS)
    cluster.execute("dist.destroy_process_group(group)\ngroup = None", timeout_s=30)


def test_a_gloo_group_that_torch_cannot_connect_again_refuses_its_calls(
    cluster: Cluster,
) -> None:
    cluster.execute(GROUPS["gloo"])
    begin = (
        "if rank == 0: dist.all_reduce(torch.ones(1000), async_op=True, group=group)"
    )
    for _ in range(4):
        with pytest.raises(CellError):
            cluster.execute(begin + FAILS)
        assert outputs(cluster, LOOP) == ["[4.0, 8.0, 12.0, 16.0]\n"] * 4
    with pytest.raises(CellError):
        cluster.execute(begin + FAILS)
    with pytest.raises(CellError, match="make a new group on all its ranks"):
        cluster.execute(LOOP)
    cluster.execute(GROUPS["gloo"])
    assert outputs(cluster, LOOP) == ["[4.0, 8.0, 12.0, 16.0]\n"] * 4


@pytest.mark.parametrize("first", [0, 2])
def test_what_is_left_in_one_of_two_groups_without_a_common_rank(
    cluster: Cluster, first: int
) -> None:
    """The groups [0, 1] and [2, 3], as of a mesh."""
    cluster.execute(
        "pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]\n"
        "group = pairs[rank // 2]\ndist.all_reduce(torch.ones(1), group=group)"
    )
    with pytest.raises(CellError, match="typo"):
        cluster.execute(
            f"if rank == {first}:\n"
            "    w = dist.all_reduce(torch.ones(1000), async_op=True, group=group)\n"
            f"elif rank == {first + 1}: raise ValueError('typo')"
        )
    assert outputs(cluster, LOOP) == ["[2.0, 4.0, 6.0, 8.0]\n"] * 4
