"""sparse_allreduce_async: reduces a sparse COO tensor over the ranks of a set."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nbdist.errors import UsageError
from nbdist.horovod.handles import synchronize
from nbdist.horovod.ops.allgather import allgather_async
from nbdist.horovod.process_sets import ProcessSet, global_process_set
from nbdist.horovod.reduce_ops import Average, ReduceOp, Sum

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """Start to reduce a sparse COO tensor. Every rank of the set must call.

    The indices and values of all ranks are gathered.

    Args:
        tensor: Sparse COO, on a device as for `allreduce`, with equal shape, dtype and
            number of sparse dimensions on all ranks; not changed.
        name: As for `allreduce`.
        op: Average or Sum.
        process_set: The ranks that take part. Default: all ranks.

    Returns:
        A function that waits and returns the reduced tensor, coalesced. Horovod returns
        the same, instead of a handle for `synchronize`.

    Raises:
        UsageError: The tensor is dense, or `op` is another one.
    """
    if tensor.layout is not torch.sparse_coo:
        raise UsageError(
            f"a {tensor.layout} tensor: expected a sparse COO tensor; use allreduce"
        )
    if op not in (Average, Sum):
        raise UsageError(f"op={op} of a sparse tensor: expected hvd.Average or hvd.Sum")
    own = tensor.detach().coalesce()
    # allgather joins rows. A sparse tensor has one column of indices for a value.
    indices = allgather_async(
        own.indices().T.contiguous(), name and f"{name}.indices", process_set
    )
    values = allgather_async(own.values(), name and f"{name}.values", process_set)

    def wait() -> Tensor:
        total = synchronize(values)
        if op is Average:
            total = total / process_set.size()
        return torch.sparse_coo_tensor(
            synchronize(indices).T, total, own.shape, check_invariants=False
        ).coalesce()

    return wait
