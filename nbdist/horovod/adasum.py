"""Adasum: a sum of gradients that depends on their angle.

See Maleki, Musuvathi, Mytkowicz, Saarikivi, Xu, Eksarevskiy, Ekanayake and Barsoum,
"Scaling Distributed Training with Adaptive Summation" (2020). Two orthogonal gradients
are added, and two parallel gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nbdist.collectives import Group, chunk_bounds

__all__ = ["adasum", "combine_pair"]


def combine_pair(first: Tensor, second: Tensor) -> Tensor:
    """Adasum of two gradients (the paper's equation for two nodes).

    Args:
        first, second: Equal shape, floating dtype; not changed.
    """
    return _weighted(first, second, _products(first, second))


def adasum(tensors: Sequence[Tensor], group: Group) -> None:
    """Adasum of each tensor over the ranks, in place. Every rank must call.

    Ranks are combined in pairs, then pairs of pairs: (0, 1), (2, 3), then (0-1, 2-3). A
    rank without a partner takes part in the next round. All ranks get the same bits.

    Each of N ranks combines one N-th of the elements of all ranks. The ranks therefore
    send as many elements as in an all-reduce, and three numbers for each tensor and
    each pair of ranks. Call this in the body of a call of the group, as the methods of
    a transport are called.

    Args:
        tensors: One-dimensional, contiguous, of floating dtype; the same lengths and
            dtypes on all ranks.
        group: The ranks.
    """
    if group.size == 1 or not tensors:
        return
    wide = torch.float64 if _any_double(tensors) else torch.float32
    joined = torch.cat([tensor.to(wide) for tensor in tensors])
    lengths = [len(tensor) for tensor in tensors]
    bounds = chunk_bounds(len(joined), group.size)
    chunks = [joined[begin:end] for begin, end in bounds]
    begin, end = bounds[group.rank]
    cuts = _cuts(lengths, begin, end)
    mine = _tree(_own_chunk_of_all(chunks, group), cuts, group)
    _spread(mine, chunks, group)
    for tensor, reduced in zip(tensors, joined.split(lengths), strict=True):
        tensor.copy_(reduced)


def _any_double(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.dtype == torch.float64 for tensor in tensors)


def _own_chunk_of_all(chunks: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Every rank's elements of this rank's chunk."""
    own = chunks[group.rank]
    found = [torch.empty_like(own) for _ in range(group.size)]
    longest = max(map(len, chunks))
    group.transport(own.device).all_to_all(found, chunks, longest)
    return found


def _spread(mine: Tensor, chunks: Sequence[Tensor], group: Group) -> None:
    """Copy every rank's chunk to all ranks."""
    longest = max(map(len, chunks))
    transport = group.transport(mine.device)
    transport.all_to_all(chunks, [mine] * group.size, longest)


def _cuts(lengths: Sequence[int], begin: int, end: int) -> list[tuple[int, int]]:
    """The range of each tensor within the chunk from `begin` to `end`; may be empty."""
    cuts, start = [], 0
    for length in lengths:
        low, high = max(start, begin), min(start + length, end)
        cuts.append((low - begin, max(low, high) - begin))
        start += length
    return cuts


def _tree(rows: list[Tensor], cuts: list[tuple[int, int]], group: Group) -> Tensor:
    """The ranks' rows, combined pair by pair."""
    while len(rows) > 1:
        pairs = list(zip(rows[::2], rows[1::2], strict=False))
        # Each rank has a part of each product. The sum over the ranks is the product.
        products = torch.stack(
            [
                _products(a[low:high], b[low:high])
                for a, b in pairs
                for low, high in cuts
            ]
        )
        group.transport(products.device).all_reduce(products.view(-1), "sum")
        table = products.view(len(pairs), len(cuts), 3)
        combined = [
            _combine(a, b, cuts, row) for (a, b), row in zip(pairs, table, strict=True)
        ]
        rows = combined + rows[2 * len(pairs) :]
    return rows[0]


def _combine(
    first: Tensor, second: Tensor, cuts: list[tuple[int, int]], products: Tensor
) -> Tensor:
    total = torch.empty_like(first)
    for (low, high), row in zip(cuts, products, strict=True):
        if low < high:
            total[low:high] = _weighted(first[low:high], second[low:high], row)
    return total


def _products(first: Tensor, second: Tensor) -> Tensor:
    """a·b, a·a and b·b, in double precision because they affect all elements."""
    a, b = first.reshape(-1).double(), second.reshape(-1).double()
    return torch.stack([a.dot(b), a.dot(a), b.dot(b)])


def _weighted(first: Tensor, second: Tensor, products: Tensor) -> Tensor:
    dot, of_first, of_second = products.unbind()
    a = 1 - torch.where(of_first > 0, dot / (2 * of_first), 0.0)
    b = 1 - torch.where(of_second > 0, dot / (2 * of_second), 0.0)
    total: Tensor = a * first + b * second
    return total.to(first.dtype)
