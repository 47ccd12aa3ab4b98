"""all_reduce: reduces a tensor over all ranks, to the same result on each."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from torch import Tensor

from nbdist.collectives import registry
from nbdist.collectives.compression import codec_of
from nbdist.collectives.flat import check_memory, check_writable, unwrapped
from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle
from nbdist.collectives.ops.validation import resolve
from nbdist.collectives.reduction import ReduceOp, parse_op
from nbdist.errors import UsageError

__all__ = ["all_reduce"]


def all_reduce(
    tensor: Tensor,
    op: ReduceOp = "sum",
    *,
    algorithm: str = "auto",
    compression: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """Reduce a tensor over all ranks, in place. Every rank of the group must call.

    All ranks get the same bits. Without compression, the error of a sum is at most
    (N-1) eps sum|x_i|, where eps is the dtype's. float16 and bfloat16 are accumulated
    in float32.

    Args:
        tensor: on the CPU, this rank's GPU, or another device, whose data then goes
            through host memory; of any shape and strides, with equal shape, dtype and
            kind of device on all ranks; overwritten.
        op: "sum", "mean", "product", "min", "max", "band", "bor", "bxor", or a
            `torch.distributed.ReduceOp`.
        algorithm: "auto" for the fastest, or "ring", "mpi", "shared", "hierarchical" or
            "nccl" if it is available for the tensor's device.
        compression: "bf16" or "int8", for the sum or mean of a floating-point tensor of
            ranks on several hosts: the format in which its values are sent between the
            hosts, with 0.5 or 0.26 of the bytes. With "int8" the error of a call is
            corrected in the next call for the same memory. It has no effect on one
            host, on fewer than 4,096 elements, and on float64. Default:
            $NBDIST_COMPRESSION, without which values are sent as they are.
        group: the ranks that take part. Default: all ranks.
        async_op: return a handle at once. Do not use the tensor before its `wait` has
            returned.
        timeout: seconds, or a timedelta, to wait for the other ranks. Default:
            $NBDIST_COLLECTIVE_TIMEOUT, without which there is no limit.

    Returns:
        The handle with `async_op`, else None.

    Raises:
        UsageError: the tensor, the algorithm, the compression or the device cannot be
            used.
        UnsupportedCollective: `op` is not defined for the dtype. Nothing was sent.
        CollectiveMismatch: the ranks made different calls. No data has changed.
        CollectiveTimeout: a rank did not make the call in time.
        CollectiveAborted: the call was released, for instance because a rank died.
    """
    group = group or registry.default or registry.default_group()
    if compression is not None:
        codec_of(compression)  # raises for an unknown name
        if algorithm != "auto":
            raise UsageError(
                f"compression={compression!r} and algorithm={algorithm!r}: pass one of "
                "them"
            )
    if group.quick is not None and algorithm == "auto" and not async_op:
        try:
            done = group.quick.all_reduce(tensor, op)
            if done:
                return None
            if done is None:
                name = parse_op(op, tensor.dtype)
                kind = group.plan("all_reduce", tensor, name).kind
                group.finish_quick(kind, timeout)
                return None
        except BaseException as error:
            group.break_quick(error)
            raise
    resolve(tensor, group)
    tensor = unwrapped(tensor)
    check_memory(tensor)
    check_writable(tensor)
    name = parse_op(op, tensor.dtype)
    if compression is not None and len(set(group.hosts)) > 1:
        algorithm = compression
    plan = group.plan("all_reduce", tensor, name, algorithm=algorithm)
    if algorithm == "auto":
        group.keep_quick(tensor, op, plan.kind)
    body = partial(plan.transport.all_reduce, tensor, name)
    return group.start(plan, body, async_op, timeout)
