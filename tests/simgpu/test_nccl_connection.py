"""Ranks that wait in NCCL's connection for a rank that never connects."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from nbdist import CellTimeout, Cluster, NbdistError
from tests.gpu_marks import needs_gpus, simulated
from tests.processes import HANG_S

N = 2
GROUPS = """
import ctypes, os, time
from torch.nn.parallel import DistributedDataParallel as DDP
mine, x = rank + 5, torch.full((3,), rank + 1.0, device=device)
group = dist.new_group([0, 1])
pure = dist.new_group([0, 1], backend="nccl")
def batch(group):
    ops = [dist.P2POp(dist.isend, x, 1, group), dist.P2POp(dist.irecv, x + 0, 1, group)]
    [work.wait() for work in dist.batch_isend_irecv(ops)]
def end_next_init(error):
    ctypes.CDLL(None).simgpu_end_next_init(error)
"""
AGAIN = """
y = torch.full((3,), rank + 1.0, device=device)
dist.all_reduce(y, group=group)
assert y.tolist() == [3.0] * 3
"""
AFTER = """
group = dist.new_group([0, 1])
pure = dist.new_group([0, 1], backend="nccl")
for each in (None, group, pure):
    y = torch.full((3,), rank + 1.0, device=device)
    dist.all_reduce(y, group=each)
    assert y.tolist() == [3.0] * 3
    if rank == 0: dist.send(y, 1, group=each)
    else: dist.recv(y.zero_(), 0, group=each)
    assert y.tolist() == [3.0] * 3
y = torch.full((3,), rank + 1.0, device=device)
nbdist.all_reduce(y)
assert y.tolist() == [3.0] * 3
"""
FIRST = {
    "send": "dist.send(x, 1, group={group})",
    "isend": "dist.isend(x, 1, group={group})",
    "recv": "dist.recv(x, 1, group={group})",
    "batch_isend_irecv": "batch({group})",
    "all_reduce": "dist.all_reduce(x, group={group})",
    "ddp": "DDP(torch.nn.Linear(3, 3).to(device), process_group={group})",
}
NAMES = {
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "batch_isend_irecv": "a batch",
    "all_reduce": "allreduce",
    "ddp": "",
}
first = pytest.mark.parametrize("operation", FIRST)
on = pytest.mark.parametrize("group", ["group", "pure"])
BUSY = "\nelse:\n    for _ in range(200): time.sleep(0.1)"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(2),
    pytest.mark.timeout(200),
    needs_gpus(N),
]


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with Cluster(N, device="cuda", threads=1, on_failure="replace") as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    running.execute(GROUPS, timeout_s=60)
    yield running
    if all(running["'group' in globals()"]):  # no rank has died
        running.execute(AGAIN, timeout_s=60)
    running.execute(AFTER, timeout_s=60)


def alone(operation: str, group: str) -> str:
    return f"if rank == 0:\n    {FIRST[operation].format(group=group)}; x.tolist()"


def released(
    cluster: Cluster, code: str, timeout_s: float = HANG_S, died: int = -1
) -> str:
    """The error of a cell, which ends at a time-out only if the test sets it.

    The ranks that live keep their variables.
    """
    before = [info.pid for info in cluster.ranks]
    with pytest.raises(NbdistError) as ended:
        cluster.execute(code, timeout_s=timeout_s)
    said = str(ended.value)
    assert isinstance(ended.value, CellTimeout) == (timeout_s < HANG_S), said
    assert "did not react" not in said
    kept = [rank for rank in range(N) if rank != died]
    cluster.execute("pass", timeout_s=60)
    pids = [info.pid for info in cluster.ranks]
    assert [pids[rank] for rank in kept] == [before[rank] for rank in kept], said
    assert cluster.pull("mine", ranks=kept) == [rank + 5 for rank in kept]
    return said


@first
@on
def test_a_rank_whose_peer_has_ended_its_cell(
    cluster: Cluster, operation: str, group: str
) -> None:
    said = released(cluster, alone(operation, group))
    assert f"released from {NAMES[operation]}" in said, said
    assert "rank 0" in said, said
    assert "the cell of rank 1 has ended" in said, said


@first
@on
def test_a_rank_whose_peer_fails(cluster: Cluster, operation: str, group: str) -> None:
    said = released(
        cluster, f"{alone(operation, group)}\nelse: raise ValueError('odd')"
    )
    assert f"released from {NAMES[operation]}" in said, said
    assert "ValueError: odd" in said, said


@first
@on
def test_a_cell_whose_time_out_passes(
    cluster: Cluster, operation: str, group: str
) -> None:
    said = released(cluster, alone(operation, group) + BUSY, timeout_s=3)
    assert "not finished after 3 s: rank 0 at" in said, said
    assert f"rank 0 at {NAMES[operation]}" in said, said


@first
def test_an_interrupt(cluster: Cluster, operation: str) -> None:
    interrupt = threading.Timer(3, cluster.interrupt)
    interrupt.start()
    released(cluster, alone(operation, "group") + BUSY)
    interrupt.join()


@first
def test_a_rank_whose_peer_dies(cluster: Cluster, operation: str) -> None:
    said = released(
        cluster,
        f"{alone(operation, 'group')}\n"
        "else:\n    time.sleep(1); os.kill(os.getpid(), 9)",
        died=1,
    )
    assert "rank 1" in said, said


CALLS = {
    "all_reduce": "dist.all_reduce(x, group=group)",
    "send": "(dist.recv if rank else dist.send)(x, 1 - rank, group=group)",
    "nbdist": "nbdist.all_reduce(x, group=fresh)",
    "pure": "dist.all_reduce(x, group=pure)",
    "ddp": FIRST["ddp"].format(group="group"),
    "pure ddp": FIRST["ddp"].format(group="pure"),
}
calls = pytest.mark.parametrize("name", CALLS)
FRESH = "fresh = nbdist.collectives.default_group().new([0, 1])"


@simulated
@calls
def test_a_rank_that_dies_while_it_connects(cluster: Cluster, name: str) -> None:
    code = f"if rank == 1: end_next_init(-1)\n{CALLS[name]}; x.tolist()"
    cluster.execute(FRESH, timeout_s=60)
    said = released(cluster, code, died=1)
    assert "rank 1" in said, said


ERRORS = {1: "unhandled cuda error", 2: "unhandled system error"}
"""ncclUnhandledCudaError, such as a lack of memory, and ncclSystemError."""


@simulated
@calls
@pytest.mark.parametrize(("bad", "error"), [(0, 1), (1, 2)])
def test_a_rank_that_cannot_connect(
    cluster: Cluster, name: str, bad: int, error: int
) -> None:
    cluster.execute(FRESH, timeout_s=60)
    code = f"if rank == {bad}: end_next_init({error})\n{CALLS[name]}; x.tolist()"
    if name == "nbdist":  # another transport is used
        cluster.execute(code, timeout_s=60)
        return
    said = released(cluster, code)
    assert ERRORS[error] in said, said
    assert "released from" in said, said
    assert f"rank {bad}: DistBackendError" in said, said


@simulated
@pytest.mark.gpus(4)
@needs_gpus(4)
@pytest.mark.parametrize("name", ["all_reduce", "ddp"])
@on
def test_a_middle_rank_that_cannot_connect(name: str, group: str) -> None:
    """The others wait for it and for each other."""
    with Cluster(4, device="cuda", threads=1) as cluster:
        cluster.execute(GROUPS.replace("[0, 1]", "[0, 1, 2, 3]"), timeout_s=60)
        call = FIRST[name].format(group=group)
        with pytest.raises(NbdistError) as ended:
            cluster.execute(f"if rank == 2: end_next_init(1)\n{call}", timeout_s=HANG_S)
        said = str(ended.value)
        assert not isinstance(ended.value, CellTimeout), said
        assert "rank 2: DistBackendError" in said, said
        assert "ranks 0-1,3 of 4" in said, said


EAGER = """
eager = dist.new_group([0, 1], backend="nccl", device_id=device)
assert eager.bound_device_id == device
"""
BY_CPP = """
from torch.distributed._functional_collectives import all_reduce
if rank == 0: (all_reduce(x, "sum", eager) + 0).tolist()
"""


@simulated
@pytest.mark.parametrize(("bad", "error"), [(0, 1), (1, 2), (1, -1)])
def test_a_rank_that_cannot_connect_a_group_with_a_device_id(
    bad: int, error: int
) -> None:
    """Such a group connects when it is made. A failure forms the world again."""
    with Cluster(N, device="cuda", threads=1, on_failure="replace") as cluster:
        cluster.execute(GROUPS, timeout_s=HANG_S)
        said = released(
            cluster,
            f"if rank == {bad}: end_next_init({error})\n{EAGER}",
            died=bad if error < 0 else -1,
        )
        assert f"rank {bad}" in said, said
        assert ERRORS.get(error, "SIGKILL") in said, said
        cluster.execute(GROUPS + EAGER + AFTER, timeout_s=HANG_S)


def test_a_first_call_of_cpp_on_a_group_with_a_device_id(cluster: Cluster) -> None:
    cluster.execute(EAGER, timeout_s=HANG_S)
    assert "the cell of rank 1 has ended" in released(cluster, BY_CPP)


TRIAL = """
from nbdist.engine import torch_group
os.environ["CUDA_VISIBLE_DEVICES"] = "MIG-1"
if rank == 1: end_next_init(2)
takes = torch_group._nccl_takes_devices()
"""


@simulated
def test_mig_devices_of_which_nccl_refuses_one() -> None:
    """As at a start, which then goes on without NCCL."""
    with Cluster(N, device="cuda", threads=1) as cluster:
        cluster.execute(GROUPS + TRIAL, timeout_s=HANG_S)
        assert cluster["takes"] == [False, False]
        cluster.execute("nbdist.all_reduce(torch.ones(1))", timeout_s=HANG_S)


@on
@pytest.mark.parametrize("operation", ["send", "recv", "batch_isend_irecv"])
def test_a_later_message_whose_peer_has_ended_its_cell(
    cluster: Cluster, operation: str, group: str
) -> None:
    cluster.execute(
        f"dist.all_reduce(x, group={group})\n"
        f"if rank == 0: dist.send(x, 1, group={group})\n"
        f"else: dist.recv(x, 0, group={group})\n"
        "x.tolist()",
        timeout_s=60,
    )
    said = released(cluster, alone(operation, group))
    assert "the cell of rank 1 has ended" in said, said


@on
def test_a_rank_whose_messages_are_done_is_not_released(
    cluster: Cluster, group: str
) -> None:
    """NCCL can complete a message that its peer has not received."""
    cluster.execute(
        "from nbdist.collectives.torch_backend.process_group import nccl_links\n"
        f"(dist.recv if rank else dist.send)(x, 1 - rank, group={group})\n"
        "x.tolist()\n"
        f"if rank == 0: nccl_links({group}).sent[1] += 1; time.sleep(6)",
        timeout_s=60,
    )
