"""Reductions of tensors that are strided on some ranks, for `test_small_slots.py`."""

from __future__ import annotations

import random

import torch
from torch import Tensor

import nbdist

DTYPES = torch.float32, torch.int64, torch.bfloat16


def _values(length: int, rank: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(length) + 3 * rank) % 7).to(dtype)


def _laid_out(values: Tensor, is_strided: bool) -> Tensor:
    if not is_strided:
        return values.clone()
    return values.repeat_interleave(2)[::2]


def wrong_reductions(seed: int, draws: int, slot_bytes: int) -> list[str]:
    """Reduce tensors whose sizes are about a slot's, a page's and 32 KiB.

    Returns:
        The draws with a wrong result on this rank.
    """
    nbdist.init()
    rank, size = nbdist.rank(), nbdist.size()
    random_number = random.Random(seed)  # the same on all ranks
    wrong = []
    for draw in range(draws):
        dtype = random_number.choice(DTYPES)
        edge = random_number.choice([4096, slot_bytes, slot_bytes * size, 32 * 1024])
        times, more = random_number.randint(1, 4), random_number.randint(-2, 2)
        length = max(edge * times // dtype.itemsize + more, 1)
        strided = [random_number.random() < 0.5 for _ in range(size)]
        operation = random_number.choice(["all_reduce", "reduce", "reduce_scatter"])
        op = random_number.choice(["sum", "max"])
        rows = torch.stack([_values(length, each, dtype) for each in range(size)])
        expected = rows.sum(0).to(dtype) if op == "sum" else rows.amax(0)
        tensor = _laid_out(rows[rank], strided[rank])
        if operation == "all_reduce":
            nbdist.all_reduce(tensor, op)
        elif operation == "reduce":
            nbdist.reduce(tensor, 1, op)
            expected = expected if rank == 1 else rows[rank]
        else:
            inputs = [_laid_out(rows[rank], each) for each in strided]
            nbdist.reduce_scatter(tensor, inputs, op)
        if not torch.equal(tensor, expected):
            wrong.append(f"{draw}: {operation} {op} {dtype} {length} {strided}")
    return wrong
