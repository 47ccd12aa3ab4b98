"""Calls of torch.distributed that cannot complete, and the calls after them."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch._dynamo  # the first DDP imports it, which can take a case's whole time
import torch.distributed as dist
from default_process_groups import meet, run_cases
from torch import nn
from torch._C._distributed_c10d import BarrierOptions
from torch.nn.parallel import DistributedDataParallel

from nbdist.collectives import release_calls, renew_groups
from nbdist.collectives.torch_backend.process_group import original_error
from nbdist.errors import (
    CollectiveAborted,
    CollectiveMismatch,
    CollectiveTimeout,
    UnsupportedCollective,
    UsageError,
)

SOON_S = 0.3


def run_all_cases() -> dict[str, str | None]:
    """Run every case. Returns this rank's errors, by case. Every rank must call."""
    import torch._dynamo  # DDP does so at first, which can take longer than a body may

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_cases(
        {name: _followed_by_all_reduce(case) for name, case in CASES.items()}
    )


def _followed_by_all_reduce(case: Callable[[], None]) -> Callable[[], None]:
    """Return the case, followed by an all-reduce that must succeed."""

    def case_and_sum() -> None:
        case()
        check_sum()

    return case_and_sum


def check_sum() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    assert tensor.item() == size * (size - 1) / 2


def renew_groups_as_a_cluster() -> None:
    """Renew all groups, as a cluster does when every rank is idle."""
    meet()
    renew_groups(1)


def after_delay(action: Callable[[], None]) -> None:
    threading.Timer(SOON_S, action).start()


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


# -- cases -----------------------------------------------------------------------------


def mismatch_shows_each_rank_and_line() -> None:
    rank = dist.get_rank()
    frame = inspect.currentframe()
    assert frame is not None
    with pytest.raises(CollectiveMismatch) as caught:
        dist.all_reduce(torch.zeros(2 + (rank == 1)))
    line = frame.f_lineno - 1
    rows = str(caught.value).splitlines()[2:-1]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert "(3,)" in rows[1]
    assert all(row.endswith(f"line {line}") for row in rows), (line, rows)


def mismatch_is_raised_by_the_wait_of_an_async_call() -> None:
    tensor = torch.zeros(2)
    if dist.get_rank() == 2:
        work = dist.broadcast(tensor, 0, async_op=True)
    else:
        work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(CollectiveMismatch, match="broadcast"):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(RuntimeError, match="different collectives"):
        work.get_future().wait()


def mismatch_in_backward() -> None:
    net = DistributedDataParallel(nn.Linear(4, 4))
    loss = net(torch.ones(1, 4)).sum()
    if dist.get_rank() == 3:
        with pytest.raises(CollectiveMismatch):
            dist.all_reduce(torch.zeros(1))
    else:
        with pytest.raises(RuntimeError, match="different collectives") as caught:
            loss.backward()
        assert isinstance(original_error(caught.value), CollectiveMismatch)
        unrelated = RuntimeError("something else")
        assert original_error(unrelated) is unrelated


def interrupt_in_barrier() -> None:
    sub = dist.new_group([0, 1])
    if dist.get_rank() == 1:
        after_delay(interrupt)
        with pytest.raises(KeyboardInterrupt):
            dist.barrier()
    elif dist.get_rank() != 0:
        with pytest.raises(CollectiveAborted, match="left it"):
            dist.barrier()
    renew_groups_as_a_cluster()
    if dist.get_rank() in (0, 1):
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=sub)
        assert tensor.tolist() == [2, 2]


def interrupt_in_wait() -> None:
    if dist.get_rank() != 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        if dist.get_rank() == 1:
            after_delay(interrupt)
            with pytest.raises(KeyboardInterrupt):
                work.wait()
            release_calls(KeyboardInterrupt())
        with pytest.raises((KeyboardInterrupt, CollectiveAborted)):
            work.wait()
    renew_groups_as_a_cluster()


def interrupt_in_receive() -> None:
    if dist.get_rank() == 1:
        after_delay(interrupt)
        with pytest.raises(KeyboardInterrupt):
            dist.recv(torch.ones(3), 0)
    renew_groups_as_a_cluster()


def release_from_backward() -> None:
    net = DistributedDataParallel(nn.Linear(4, 4))
    loss = net(torch.ones(1, 4)).sum()
    if dist.get_rank() == 1:
        after_delay(lambda: release_calls(CollectiveAborted("rank 0 is gone")))
    if dist.get_rank() != 0:
        with pytest.raises(RuntimeError, match="rank 0 is gone"):
            loss.backward()
    renew_groups_as_a_cluster()
    net = DistributedDataParallel(nn.Linear(4, 4))
    net(torch.ones(1, 4) * dist.get_rank()).sum().backward()
    assert net.module.weight.grad is not None
    torch.testing.assert_close(net.module.weight.grad, torch.full((4, 4), 1.5))


def timeout_names_the_missing() -> None:
    group, options = dist.group.WORLD, BarrierOptions()
    assert group is not None
    options.timeout = timedelta(seconds=SOON_S)  # dist.barrier of torch 2.7 takes none
    if dist.get_rank() != 2:
        with pytest.raises((CollectiveTimeout, CollectiveAborted), match="rank 2"):
            group.barrier(options).wait()
    renew_groups_as_a_cluster()


def async_calls_keep_their_order() -> None:
    size = dist.get_world_size()
    tensors = [torch.full((n,), float(n)) for n in (1, 100_000, 7, 50_000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    total = torch.ones(1)
    dist.all_reduce(total)  # behind the others
    assert all(work.is_completed() for work in works)
    for tensor in tensors:
        assert bool((tensor == size * len(tensor)).all())


def invalid_calls_are_refused() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.raises(UnsupportedCollective, match="bool"):
        dist.all_reduce(torch.ones(1, dtype=torch.bool), dist.ReduceOp.AVG)
    with pytest.raises(UsageError, match="contiguous"):
        dist.send(torch.ones(4, 4).t()[1:], (rank + 1) % size)
    with pytest.raises(UsageError, match="expected rank"):
        _create_with_another_rank()


def _create_with_another_rank() -> None:
    from nbdist.collectives.torch_backend.rendezvous import members_of

    members_of([], (dist.get_rank() + 1) % 4, 4)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        mismatch_shows_each_rank_and_line,
        mismatch_is_raised_by_the_wait_of_an_async_call,
        mismatch_in_backward,
        interrupt_in_barrier,
        interrupt_in_wait,
        interrupt_in_receive,
        release_from_backward,
        async_calls_keep_their_order,
        invalid_calls_are_refused,
        timeout_names_the_missing,
    )
}
