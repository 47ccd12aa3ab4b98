"""all_reduce: the same reduction on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch import Tensor

from ._arguments import Flat, is_plain, resolve
from ._handle import Handle
from ._reduction import ReduceOp, parse_op
from ._signature import signature
from .group import Group

__all__ = ["all_reduce"]


def all_reduce(
    tensor: Tensor,
    op: ReduceOp = "sum",
    *,
    algorithm: str = "auto",
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """Reduce a tensor over all ranks, in place. Every rank of the group must call.

    All ranks get the same bits. A sum lies within (N-1) eps sum|x_i| of the exact one,
    eps being the dtype's; half types are accumulated in float32.

    Args:
        tensor: any shape, strided, equal shape and dtype on all ranks; overwritten.
        op: "sum", "mean", "product", "min", "max", "band", "bor", "bxor", or c10d's.
        algorithm: "auto", "ring", "mpi", "shared" or "nccl", as far as there is such a
            one for the tensor's device.
        group: default: all ranks.
        async_op: return a handle at once; the tensor is the group's until it is done.
        timeout: seconds to wait for the other ranks; None takes the configured time.

    Raises:
        UnsupportedCollective: `op` is not defined for the dtype. Nothing was sent.
        CollectiveMismatch, CollectiveTimeout, CollectiveAborted: see `Group.run`.
    """
    group = resolve(tensor, group)
    prepared = None
    if algorithm == "auto" and tensor.is_cpu:
        prepared = group.prepared.find(op, tensor.dtype, tensor.shape)
    if prepared is not None:
        kind, reduce = prepared
        body = partial(reduce, tensor) if is_plain(tensor) else _flat(reduce, tensor)
        return group.run(kind, body, meets=True, async_op=async_op, timeout=timeout)
    op = parse_op(op, tensor.dtype)
    device = tensor.device.type
    transport = group.transport(tensor.device, algorithm)
    kind = signature("all_reduce", op, None, tensor.dtype, tensor.shape, device)
    body = _flat(partial(transport.all_reduce, op=op), tensor)
    return group.run(
        kind, body, meets=transport.meets, async_op=async_op, timeout=timeout
    )


def _flat(reduce: Callable[[Tensor], None], tensor: Tensor) -> Callable[[], None]:
    flat = Flat(tensor)

    def body() -> None:
        reduce(flat.tensor)
        flat.write_back()

    return body
