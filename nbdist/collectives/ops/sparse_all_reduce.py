"""sparse_all_reduce: sums sparse COO tensors over all ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.ops.all_gather import all_gather_into_tensor
from nbdist.collectives.reduction import ReduceOp, parse_op
from nbdist.collectives.registry import default_group
from nbdist.errors import UnsupportedCollective, UsageError

__all__ = ["sparse_all_reduce"]


def sparse_all_reduce(
    tensor: Tensor,
    op: ReduceOp = "sum",
    *,
    group: Group | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Sum a sparse COO tensor over all ranks, in place. Every rank must call.

    Each rank sends its indices and values to all ranks, so the memory grows with the
    number of ranks. The result is coalesced, with the same bits on all ranks.

    Args:
        tensor: sparse COO, on a device as for `all_reduce`, with equal shape, dtype and
            number of sparse dimensions on all ranks; overwritten. The ranks may differ
            in the number of elements.
        op: "sum" or "mean", or a `torch.distributed.ReduceOp`.
        group: the ranks that take part. Default: all ranks.
        timeout: seconds, or a timedelta, to wait for the other ranks in each of the
            three messages.

    Raises:
        UnsupportedCollective: another op, or the ranks' sparse dimensions differ.
        UsageError: the ranks' shapes differ.
        CollectiveMismatch, CollectiveTimeout, CollectiveAborted: as for `all_reduce`.
    """
    name = parse_op(op, tensor.dtype)
    if name not in ("sum", "mean"):
        raise UnsupportedCollective(
            f"{name} of sparse tensors: expected sum or mean; pass tensor.to_dense()"
        )
    group = default_group() if group is None else group
    with torch.no_grad():
        mine = tensor.detach().coalesce()
        indices, values = mine.indices(), mine.values()
        longest, counts = _agree(mine, group, timeout)
        index_rows = _gather(indices.t(), longest, group, timeout)
        value_rows = _gather(values, longest, group, timeout)
        total = torch.sparse_coo_tensor(
            torch.cat(
                [rows[:n] for rows, n in zip(index_rows, counts, strict=True)]
            ).t(),
            torch.cat([rows[:n] for rows, n in zip(value_rows, counts, strict=True)]),
            tensor.shape,
            check_invariants=False,
        ).coalesce()
        if name == "mean":
            total = total / group.size
        tensor.copy_(total)


def _agree(
    tensor: Tensor, group: Group, timeout: float | timedelta | None
) -> tuple[int, list[int]]:
    """The greatest number of elements of a rank, and each rank's."""
    layout = [tensor.sparse_dim(), *tensor.shape]
    mine = torch.tensor([tensor._nnz(), *layout], device="cpu")
    every = mine.new_empty(group.size, len(mine))
    all_gather_into_tensor(every, mine, group=group, timeout=timeout)
    for rank, row in zip(group.ranks, every.tolist(), strict=True):
        if row[1:] != layout:
            kind = UsageError if row[1] == layout[0] else UnsupportedCollective
            raise kind(
                f"rank {rank} has a sparse tensor of shape {tuple(row[2:])} with "
                f"{row[1]} sparse dimensions; this rank's has {tuple(tensor.shape)} "
                f"with {layout[0]}: pass the same on all ranks"
            )
    counts = every[:, 0].tolist()
    return max(counts), counts


def _gather(
    rows: Tensor, longest: int, group: Group, timeout: float | timedelta | None
) -> Tensor:
    """All ranks' rows, each rank's filled up to the same number."""
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    every = rows.new_empty(group.size, *padded.shape)
    if padded.numel():
        all_gather_into_tensor(every, padded, group=group, timeout=timeout)
    return every
