"""Shows the calls of a process group to PyTorch's dispatcher.

c10d's operations on a C++ process group are operators, such as `c10d::allreduce_`, so
that the profiler and a TorchDispatchMode see each call. The operations of a Python
process group are plain methods. While a tool observes the calling thread, a call goes
through an overload "nbdist" of the same operator, so that the tool sees the same name.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView as BelowAutograd
from torch.utils import _pytree as pytree

__all__ = ["OPERATORS", "define_operators", "observed", "through_dispatcher"]

OPERATORS = {
    "allreduce": "allreduce_",
    "allreduce_coalesced": "allreduce_coalesced_",
    "reduce": "reduce_",
    "reduce_scatter": "reduce_scatter_",
    "_reduce_scatter_base": "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "broadcast": "broadcast_",
    "allgather": "allgather_",
    "allgather_coalesced": "allgather_coalesced_",
    "_allgather_base": "_allgather_base_",
    "allgather_into_tensor_coalesced": "allgather_into_tensor_coalesced_",
    "alltoall": "alltoall_",
    "alltoall_base": "alltoall_base_",
    "gather": "gather_",
    "gather_into_tensor": "gather_",
    "scatter": "scatter_",
    "send": "send",
    "recv": "recv_",
    "recv_anysource": "recv_any_source_",
    "barrier": "barrier",
}
"""The operator of each method of a process group."""

_calls: dict[int, Callable[[], dist.Work]] = {}
_works: dict[int, dist.Work] = {}
_numbers = itertools.count()

_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def observed() -> bool:
    """Whether a TorchDispatchMode or the profiler observes this thread."""
    return _modes() > 0 or _profiled()


def through_dispatcher(
    name: str, tensors: object, call: Callable[[], dist.Work]
) -> dist.Work | None:
    """Make a call as an operator, so that tools see it.

    Args:
        name: a key of `OPERATORS`.
        tensors: the tensors of the call, in lists of any depth.
        call: makes the call.

    Returns:
        The work of the call; None if a tool answered the operator without the call, as
        FakeTensorMode does.
    """
    operator = getattr(torch.ops.c10d, OPERATORS[name]).nbdist
    number = next(_numbers)
    _calls[number] = call
    flat = [leaf for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, Tensor)]
    try:
        with BelowAutograd():  # the operators have no derivative
            operator(flat, number)
        return _works.pop(number, None)
    finally:
        del _calls[number]


def _make_call(_: list[Tensor], number: int) -> None:
    _works[number] = _calls[number]()


def _answer_fake(_: list[Tensor], number: int) -> None:
    """Fake and meta tensors have no data to send."""


@functools.cache
def define_operators() -> tuple[torch.library.Library, ...]:
    """Define the overloads. They last as long as the process."""
    c10d = torch.library.Library("c10d", "FRAGMENT")
    for operator in sorted(set(OPERATORS.values())):
        name = f"{operator}.nbdist"
        c10d.define(f"{name}(Tensor(a!)[] tensors, int call) -> ()")
        c10d.impl(name, _make_call, "CompositeExplicitAutograd")
        c10d.impl(name, _answer_fake, "Meta")
    functional = torch.library.Library("_c10d_functional", "IMPL")
    functional.impl("all_gather_into_tensor_out", _all_gather_out, "CPU")
    functional.impl("reduce_scatter_tensor_out", _reduce_scatter_out, "CPU")
    return c10d, functional


# torch's own kernels of these two ask for a C++ backend. These also serve its groups.


def _all_gather_out(
    input: Tensor, group_size: int, group_name: Any, *, out: Tensor
) -> Tensor:
    group: Any = torch._C._distributed_c10d._resolve_process_group(group_name)
    work = group._allgather_base(out, input)
    torch._C._distributed_c10d._register_work(out, work)
    return out


def _reduce_scatter_out(
    input: Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: Tensor
) -> Tensor:
    group: Any = torch._C._distributed_c10d._resolve_process_group(group_name)
    options = dist.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, reduce_op.upper())
    work = group._reduce_scatter_base(out, input, options)
    torch._C._distributed_c10d._register_work(out, work)
    return out
