"""All-reduces by every public API, run on ranks by `test_reduction_paths.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import nbdist
import nbdist.horovod as hvd
from nbdist.collectives import registry
from nbdist.collectives.ops import premul_sum

LENGTHS = count(1001)
Path = Callable[[torch.Tensor], object]


def _optimizer(parameter: torch.Tensor) -> None:
    leaf = parameter.clone().requires_grad_()
    optimizer = torch.optim.SGD([leaf], lr=0.1)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=[("leaf", leaf)])
    leaf.sum().backward()
    wrapped.step()


def _ddp(tensor: torch.Tensor) -> None:
    model = torch.nn.Linear(tensor.numel(), 1, bias=False)
    wrapped = DistributedDataParallel(model)
    wrapped(tensor).sum().backward()


PATHS: dict[str, Path] = {
    "nbdist.all_reduce": nbdist.all_reduce,
    "async": lambda t: nbdist.all_reduce(t, async_op=True).wait(),
    "mean": lambda t: nbdist.all_reduce(t, "mean"),
    "reduce": lambda t: nbdist.reduce(t, 1),
    "reduce_scatter": lambda t: nbdist.reduce_scatter(t, [t.clone(), t.clone()]),
    "premul_sum": lambda t: premul_sum.premul_sum_all_reduce(t, 0.5),
    "premul_sum_reduce": lambda t: premul_sum.premul_sum_reduce(t, 0, 0.5),
    "premul_sum_reduce_scatter": lambda t: premul_sum.premul_sum_reduce_scatter(
        t, [t.clone(), t.clone()], 0.5
    ),
    "hvd.allreduce": hvd.allreduce,
    "hvd.allreduce_": hvd.allreduce_,
    "hvd.reducescatter": lambda t: hvd.reducescatter(torch.cat([t, t])),
    "hvd.grouped_allreduce": lambda t: hvd.grouped_allreduce([t]),
    "hvd.DistributedOptimizer": _optimizer,
    "dist.all_reduce": dist.all_reduce,
    "dist.reduce": lambda t: dist.reduce(t, 0),
    "dist.reduce_scatter": lambda t: dist.reduce_scatter(t, [t.clone(), t.clone()]),
    "dist.reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(
        t, torch.cat([t, t])
    ),
    "DDP": _ddp,
}


def used_plans() -> dict[str, bool]:
    """Call each API with a tensor of its own length. Returns whether C reduced it."""
    torch.manual_seed(0)
    hvd.init()
    if not dist.is_initialized():
        dist.init_process_group("nbdist")
    used = {}
    for name, path in PATHS.items():
        tensor = torch.ones(next(LENGTHS))
        path(tensor)
        used[name] = tensor.numel() in planned_lengths()
    return used


def planned_lengths() -> set[int]:
    """The lengths of the tensors for which a group has a compiled reduction."""
    return {
        key[3]
        for group in registry.live
        if group._connection.reductions is not None
        for key in group._connection.reductions.plans  # type: ignore[misc]
    }


def frames() -> list[str]:
    """The Python functions that a small all-reduce calls before the compiled part."""
    hvd.init()
    tensor = torch.ones(1)
    nbdist.all_reduce(tensor)
    entered: list[str] = []
    seen: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)
        elif event == "c_call" and "QuickCalls" in repr(argument) and not entered:
            entered.extend(seen)

    all_reduce = nbdist.all_reduce
    sys.setprofile(profile)
    all_reduce(tensor)
    sys.setprofile(None)
    assert entered, seen
    return entered
