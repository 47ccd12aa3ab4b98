"""Process groups that change their members, on each rank of a launch."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from default_process_groups import DEADLINE_S, meet, run_cases
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbdist.collectives import Group
from nbdist.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveTimeout,
    UsageError,
)

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def run_all_cases() -> dict[str, str | None]:
    """Every case; what went wrong on this rank, by case. Every rank must call."""
    return run_cases(CASES)


def world() -> Any:
    return dist.group.WORLD


def handles() -> list[str]:
    own = world().get_reconfigure_handle()
    found: list[str] = MPI.COMM_WORLD.allgather(own)
    return found


def reconfigure(
    uuid: int, members: Collection[str], timeout_s: float = DEADLINE_S
) -> None:
    options = SimpleNamespace(
        uuid=uuid, handles=members, timeout=timedelta(seconds=timeout_s)
    )
    assert world().reconfigure(options).wait()


def total() -> float:
    x = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return float(x[0])


def members_leave_and_return() -> None:
    everyone = handles()
    first, last = everyone[0], everyone[-1]
    if RANK in (0, SIZE - 1):
        reconfigure(1, [last, first])
        assert dist.get_world_size() == 2
        assert dist.get_rank() == (0 if RANK == SIZE - 1 else 1)
        assert total() == 3
        source = torch.full((2,), float(RANK))
        dist.broadcast(source, group_src=0)
        assert (source == SIZE - 1).all()
    reconfigure(2, set(everyone))
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, SIZE)
    assert total() == sum(range(1, SIZE + 1))


def each_rank_is_alone_and_all_merge() -> None:
    everyone = handles()
    reconfigure(10 + RANK, [everyone[RANK]])
    assert total() == 1
    reconfigure(20, everyone[::-1])
    assert dist.get_rank() == SIZE - 1 - RANK
    assert total() == sum(range(1, SIZE + 1))


def a_rank_may_leave_as_soon_as_it_is_a_member() -> None:
    everyone = handles()
    among_living = Group.among_living

    def late(*arguments: Any) -> Group:
        made = among_living(*arguments)
        time.sleep(0.2)  # the others have connected meanwhile
        connected.touch()
        return made

    with tempfile.TemporaryDirectory() as own:
        connected = Path(MPI.COMM_WORLD.bcast(own)) / "connected"
        with mock.patch.object(
            Group, "among_living", late if RANK == 1 else among_living
        ):
            reconfigure(100, everyone)
        assert connected.exists()
        meet()  # the folder is shared
    reconfigure(110 + RANK, [everyone[RANK]])
    assert total() == 1


def ddp_averages_over_the_new_members() -> None:
    everyone = handles()
    ddp = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    if RANK == SIZE - 1:
        return
    reconfigure(30, everyone[:-1])
    ddp(torch.full((1, 3), RANK + 1.0)).sum().backward()
    mean = sum(range(1, SIZE)) / (SIZE - 1)
    gradient = ddp.module.weight.grad
    assert torch.allclose(gradient, torch.full((1, 3), mean)), gradient


def calls_under_way_end() -> None:
    everyone = handles()
    reconfigure(40, everyone)
    late = dist.all_reduce(torch.ones(2), async_op=True) if RANK == 0 else None
    reconfigure(41, everyone)
    if late is not None:
        with pytest.raises(CollectiveAborted, match="reconfigured"):
            late.wait()
    assert total() == sum(range(1, SIZE + 1))


def an_abort_is_undone() -> None:
    kinds: Any = torch._C._distributed_c10d.ErrorType  # type: ignore[attr-defined]
    reconfigure(50, handles())
    world().abort()
    with pytest.raises(CollectiveAborted, match="aborted"):
        total()
    assert world().get_error() == kinds.SUCCESS
    reconfigure(51, handles())
    assert total() == sum(range(1, SIZE + 1))


def an_abort_releases_a_rank_that_waits() -> None:
    everyone = handles()
    if RANK != 0:
        return
    timer = threading.Timer(0.2, world().abort)
    timer.start()
    with pytest.raises(CollectiveAborted, match="aborted"):
        reconfigure(60, everyone)
    with pytest.raises(UsageError, match="no members"):
        total()


def a_missing_rank_is_a_timeout() -> None:
    everyone = handles()
    if RANK == 0:
        with pytest.raises(CollectiveTimeout, match=r"within 0\.2 s"):
            reconfigure(70, everyone, timeout_s=0.2)
    reconfigure(71, everyone)
    assert total() == sum(range(1, SIZE + 1))


def wrong_handles_are_refused() -> None:
    everyone = handles()
    own, others = everyone[RANK], [each for each in everyone if each != everyone[RANK]]
    for wrong, reason in (
        (["gloo:0"], "gloo:0"),
        ([*others, "nbdist:7:0", own], "generation 0"),
        ([*others, f"nbdist:0:{SIZE}", own], f"{SIZE} ranks"),
        (others, "among them"),
        ([own, own], "each once"),
        ([], "among them"),
    ):
        with pytest.raises(UsageError, match=reason):
            reconfigure(80, wrong)
    assert total() == sum(range(1, SIZE + 1))  # nothing has changed
    reconfigure(80, everyone)  # a refused number is not used
    with pytest.raises(CollectiveError, match="already used"):
        reconfigure(80, everyone)
    assert world().supports_reconfigure


def torchs_functions_call_it() -> None:
    functions: Any = dist
    if not hasattr(functions, "_reconfigure"):  # before torch 2.14
        return
    everyone: list[str] = MPI.COMM_WORLD.allgather(functions._get_reconfigure_handle())
    assert functions._supports_reconfigure()
    functions._reconfigure(90, everyone, timeout=timedelta(seconds=9)).wait()
    assert total() == sum(range(1, SIZE + 1))


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        members_leave_and_return,
        each_rank_is_alone_and_all_merge,
        a_rank_may_leave_as_soon_as_it_is_a_member,
        ddp_averages_over_the_new_members,
        calls_under_way_end,
        an_abort_is_undone,
        an_abort_releases_a_rank_that_waits,
        a_missing_rank_is_a_timeout,
        wrong_handles_are_refused,
        torchs_functions_call_it,
    )
}
