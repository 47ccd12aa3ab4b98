"""Ranks compare the collectives that they have given to NCCL by a digest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from nbdist.collectives.torch_backend.native_calls import NativeCalls

X = torch.ones(3)


def options(kind: type, **fields: object) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def noted(*calls: tuple[str, torch.Tensor | None, list[object]]) -> NativeCalls:
    made = NativeCalls()
    for sequence, (name, tensor, others) in enumerate(calls, start=1):
        made.note(sequence, name, tensor, others)
    return made


SUM = options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.SUM)
MAX = options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)
MIN_INTO_1 = options(dist.ReduceOptions, reduceOp=dist.ReduceOp.MIN, rootRank=1)
PREMULTIPLIED = dist._make_nccl_premul_sum(2.0)
FROM = [options(dist.BroadcastOptions, rootRank=root) for root in range(2)]


@pytest.mark.parametrize(
    ("call", "details"),
    [
        (("allreduce", X, [SUM]), "sum"),
        (("allreduce", X, [dist.ReduceOp.MAX]), "max"),
        (("broadcast", X, [FROM[1]]), "root 1"),
        (("reduce", X, [1, dist.ReduceOp.SUM]), "root 1, sum"),
        (("reduce", X, [MIN_INTO_1]), "min, root 1"),
        (("allgather", None, [[X], AllgatherOptions()]), ""),
        (("alltoall_base", X, [X, [], [], dist.AllToAllOptions()]), ""),
        (("allreduce", X, [PREMULTIPLIED]), "premul_sum"),
    ],
)
def test_the_reduce_op_and_the_root_are_noted(call: Any, details: str) -> None:
    assert noted(call).details == {1: details}


def test_equal_calls_have_equal_digests() -> None:
    calls = [("allreduce", X, [SUM]), ("broadcast", X, [FROM[0]])]
    assert noted(*calls).digest == noted(*calls).digest != 0  # type: ignore[arg-type]
    # These may differ between ranks: parts of unequal size, a root's outputs.
    uneven = [("alltoall_base", torch.ones(n), [X, [n], [n]]) for n in (1, 2)]
    assert len({noted(call).digest for call in uneven}) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        ("allreduce", X, [MAX]),
        ("allreduce", torch.ones(4), [SUM]),
        ("allreduce", X.double(), [SUM]),
        ("broadcast", X, [FROM[0]]),
    ],
)
def test_different_calls_have_different_digests(other: Any) -> None:
    call: Any = ("allreduce", X, [SUM])
    assert noted(call).digest != noted(other).digest
    assert noted(call, other).digest != noted(other, call).digest
