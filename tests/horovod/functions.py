"""Horovod's functions. `test_horovod_functions.py` runs this file on ranks.

Every rank can compute the inputs of all ranks, and therefore each result. Inputs are
small whole numbers, so that every sum is exact in all dtypes.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

import nbdist
import nbdist.horovod as hvd
from nbdist.errors import (
    CollectiveMismatch,
    UnsupportedCollective,
    UsageError,
)
from nbdist.horovod.adasum import combine_pair

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS]
SHAPES: list[tuple[int, ...]] = [(), (17,), (5, 3), (4, 1, 3), (2, 3, 2, 2)]
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def run_all_cases() -> dict[str, str | None]:
    from horovod_cases import run_cases

    return run_cases(CASES)


def input_of(
    shape: tuple[int, ...], dtype: torch.dtype, rank: int, salt: int = 0
) -> Tensor:
    """The input of a rank: whole numbers from 1 to 4."""
    seed = torch.Generator().manual_seed(100 * salt + rank)
    return torch.randint(1, 5, shape, generator=seed).to(dtype)


def inputs_of_all(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [input_of(shape, dtype, rank) for rank in range(hvd.size())]


def kinds() -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    return itertools.product(SHAPES, DTYPES)


def assert_same(actual: Tensor, expected: Tensor, **tolerances: float) -> None:
    options = {"rtol": 0.0, "atol": 0.0, **tolerances}
    torch.testing.assert_close(actual, expected, **options)


# -- the world -------------------------------------------------------------------------


@case
def world() -> None:
    assert hvd.is_initialized()
    hvd.init()  # once more: nothing happens
    assert 0 <= hvd.rank() < hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert hvd.mpi_built()
    assert hvd.mpi_enabled()
    assert not hvd.gloo_enabled()
    assert isinstance(hvd.mpi_threads_supported(), bool)
    assert bool(hvd.nccl_built()) == torch.distributed.is_nccl_available()
    assert not hvd.ddl_built()
    assert not hvd.ccl_built()
    assert [name for name in hvd.__all__ if getattr(hvd, name, None) is None] == []
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"use hvd\.init"):
        hvd.rank()
    hvd.init()


@case
def init_with_some_ranks() -> None:
    hvd.shutdown()
    hvd.init(comm=list(reversed(range(torch.distributed.get_world_size()))))
    assert hvd.rank() == hvd.size() - 1 - torch.distributed.get_rank()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


# -- allreduce -------------------------------------------------------------------------


@case
def allreduce_sum() -> None:
    for shape, dtype in kinds():
        mine = input_of(shape, dtype, hvd.rank())
        expected = sum(inputs_of_all(shape, torch.float64)).to(dtype)
        assert_same(hvd.allreduce(mine, op=hvd.Sum), expected)
        assert_same(mine, input_of(shape, dtype, hvd.rank()))  # kept
        assert hvd.allreduce_(mine, op=hvd.Sum) is mine
        assert_same(mine, expected)


@case
def allreduce_average() -> None:
    for shape, dtype in kinds():
        mine = input_of(shape, dtype, hvd.rank())
        total = sum(inputs_of_all(shape, torch.float64))
        expected = total / hvd.size()
        if not dtype.is_floating_point:
            expected = expected.trunc()
        eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        for result in (
            hvd.allreduce(mine),
            hvd.allreduce(mine, average=True),
            hvd.allreduce(mine, op=hvd.Average),
            hvd.synchronize(hvd.allreduce_async(mine)),
            hvd.synchronize(hvd.allreduce_async_(mine.clone())),
        ):
            assert_same(result, expected.to(dtype), rtol=eps)


@case
def allreduce_min_max_product() -> None:
    for shape, dtype in kinds():
        stacked = torch.stack(inputs_of_all(shape, torch.float64))
        mine = input_of(shape, dtype, hvd.rank())
        assert_same(hvd.allreduce(mine, op=hvd.Min), stacked.amin(0).to(dtype))
        assert_same(hvd.allreduce(mine, op=hvd.Max), stacked.amax(0).to(dtype))
        if dtype != torch.int8:  # 4 to the power of 4 does not fit
            product = stacked.prod(0).to(torch.int64).to(dtype)
            assert_same(hvd.allreduce(mine, op=hvd.Product), product)


@case
def allreduce_is_scaled() -> None:
    for shape, dtype in kinds():
        mine = input_of(shape, dtype, hvd.rank())
        result = hvd.allreduce(
            mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5
        )
        assert_same(result, sum(inputs_of_all(shape, torch.float64)).to(dtype))
    halved = hvd.allreduce(torch.tensor([5]), op=hvd.Sum, prescale_factor=0.5)
    assert halved.tolist() == [2 * hvd.size()]  # as in Horovod: cut on each rank


@case
def allreduce_of_any_layout() -> None:
    def part(rank: int) -> Tensor:
        return input_of((6, 4), torch.float32, rank).T[1:3, ::2]

    expected = sum(part(rank) for rank in range(hvd.size()))
    mine = input_of((6, 4), torch.float32, hvd.rank())
    assert_same(hvd.allreduce(mine.T[1:3, ::2], op=hvd.Sum), expected)
    hvd.allreduce_(mine.T[1:3, ::2], op=hvd.Sum)
    assert_same(mine.T[1:3, ::2], expected)
    untouched = input_of((6, 4), torch.float32, hvd.rank())
    assert_same(mine.T[0], untouched.T[0])


@case
def allreduce_of_none() -> None:
    assert hvd.allreduce(torch.empty(0)).shape == (0,)
    assert hvd.allreduce(torch.empty(3, 0)).shape == (3, 0)


@case
def allreduce_compressed() -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        for dtype in (torch.float32, torch.float64, torch.int64):
            mine = input_of((5, 3), dtype, hvd.rank())
            result = hvd.allreduce(mine, compression=compression, op=hvd.Sum)
            assert result.dtype == dtype
            assert_same(result, sum(inputs_of_all((5, 3), dtype)))


@case
def grouped_allreduce() -> None:
    salts = range(4)
    types = [torch.float32, torch.float64, torch.float32, torch.int32]

    def inputs(rank: int) -> list[Tensor]:
        return [
            input_of(SHAPES[salt], dtype, rank, salt)
            for salt, dtype in zip(salts, types, strict=True)
        ]

    everybody = [inputs(rank) for rank in range(hvd.size())]
    expected = [sum(column) for column in zip(*everybody, strict=True)]
    mine = inputs(hvd.rank())
    in_place = inputs(hvd.rank())
    later = inputs(hvd.rank())
    for results in (
        hvd.grouped_allreduce(mine, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum)),
        hvd.grouped_allreduce_(in_place, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async_(later, op=hvd.Sum)),
    ):
        for result, wanted in zip(results, expected, strict=True):
            assert_same(result, wanted)
    for tensor, other, wanted in zip(in_place, later, expected, strict=True):
        assert_same(tensor, wanted)
        assert_same(other, wanted)
    for tensor, kept in zip(mine, inputs(hvd.rank()), strict=True):
        assert_same(tensor, kept)


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random numbers on the default device, the same on all ranks."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(shape, generator=generator)


@case
def allreduce_adasum() -> None:
    def tree(rows: list[Tensor]) -> Tensor:
        """The recursion of the paper, with whole vectors."""
        while len(rows) > 1:
            pairs = zip(rows[::2], rows[1::2], strict=False)
            rest = rows[len(rows) // 2 * 2 :]
            rows = [combine_pair(*pair) for pair in pairs] + rest
        return rows[0]

    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for shape in ((3,), (17,), (5, 3)):
            rows = [drawn(shape, r).to(dtype) for r in range(hvd.size())]
            result = hvd.allreduce(rows[hvd.rank()], op=hvd.Adasum)
            assert_same(result, tree(rows), rtol=close, atol=close)
            both = hvd.grouped_allreduce([rows[hvd.rank()], rows[0]], op=hvd.Adasum)
            assert_same(both[0], tree(rows), rtol=close, atol=close)
            assert_same(both[1], rows[0], rtol=close, atol=close)  # all alike: the mean
    half = hvd.allreduce(torch.ones(4).half(), op=hvd.Adasum)
    assert half.dtype == torch.float16
    assert half.tolist() == [1.0] * 4


# -- allgather -------------------------------------------------------------------------


@case
def sparse_allreduce() -> None:
    elements = hvd.rank()  # none on rank 0
    for shape in ((5,), (5, 2)):
        tensor = torch.sparse_coo_tensor(
            torch.arange(elements)[None],
            torch.ones(elements, *shape[1:]),
            shape,
            check_invariants=True,
        )
        expected = torch.tensor([float(max(hvd.size() - 1 - n, 0)) for n in range(5)])
        for op, divisor in ((hvd.Sum, 1), (hvd.Average, hvd.size())):
            result = hvd.sparse_allreduce_async(tensor, f"sparse.{op}", op)()
            assert result.is_sparse
            column = result.to_dense().reshape(5, -1)[:, 0]
            assert_same(column, expected / divisor)
    with pytest.raises(UsageError, match="use allreduce"):
        hvd.sparse_allreduce_async(torch.ones(3))
    with pytest.raises(UsageError, match="expected hvd"):
        hvd.sparse_allreduce_async(tensor, op=hvd.Max)


@case
def errors_have_horovods_names() -> None:
    assert issubclass(CollectiveMismatch, hvd.HorovodInternalError)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(UnsupportedCollective, RuntimeError)
    assert issubclass(hvd.HostsUpdatedInterrupt, BaseException)


@case
def allgather() -> None:
    for shape, dtype in kinds():
        if not shape:
            continue

        def part(rank: int, shape=shape, dtype=dtype) -> Tensor:
            return input_of((rank + 2, *shape[1:]), dtype, rank)

        expected = torch.cat([part(rank) for rank in range(hvd.size())])
        assert_same(hvd.allgather(part(hvd.rank())), expected)
        handle = hvd.allgather_async(part(hvd.rank()))
        assert_same(hvd.synchronize(handle), expected)


@case
def allgather_where_some_have_nothing() -> None:
    mine = torch.full((hvd.rank(), 2), float(hvd.rank()))  # rank 0: no rows
    expected = [rank for rank in range(hvd.size()) for _ in range(rank)]
    assert hvd.allgather(mine)[:, 0].tolist() == expected
    strided = input_of((2, 6), torch.int32, hvd.rank())[:, ::2]
    everybody = [each[:, ::2] for each in inputs_of_all((2, 6), torch.int32)]
    assert_same(hvd.allgather(strided), torch.cat(everybody))


@case
def grouped_allgather() -> None:
    def parts(rank: int) -> list[Tensor]:
        return [
            input_of((rank + 1, 3), torch.float32, rank),
            input_of((2, 2), torch.int64, rank),
        ]

    columns = zip(*(parts(rank) for rank in range(hvd.size())), strict=True)
    expected = [torch.cat(column) for column in columns]
    handle = hvd.grouped_allgather_async(parts(hvd.rank()))
    for results in (hvd.grouped_allgather(parts(hvd.rank())), hvd.synchronize(handle)):
        for result, wanted in zip(results, expected, strict=True):
            assert_same(result, wanted)


# -- broadcast -------------------------------------------------------------------------


@case
def broadcast() -> None:
    for shape, dtype in itertools.product(SHAPES, [*DTYPES, torch.bool]):
        for root in range(hvd.size()):
            mine = input_of(shape, dtype, hvd.rank())
            expected = input_of(shape, dtype, root)
            assert_same(hvd.broadcast(mine, root), expected)
            assert_same(mine, input_of(shape, dtype, hvd.rank()))
        root = hvd.size() - 1
        assert_same(hvd.synchronize(hvd.broadcast_async(mine, root)), expected)
        in_place = input_of(shape, dtype, hvd.rank())
        hvd.synchronize(hvd.broadcast_async_(in_place, root))
        assert_same(in_place, expected)
        assert hvd.broadcast_(mine, root) is mine
        assert_same(mine, expected)


# -- alltoall --------------------------------------------------------------------------


@case
def alltoall() -> None:
    size, rank = hvd.size(), hvd.rank()
    for shape, dtype in kinds():
        if not shape:
            continue

        def part(source: int, target: int, shape=shape, dtype=dtype) -> Tensor:
            return input_of((source + target, *shape[1:]), dtype, source, target)

        mine = torch.cat([part(rank, target) for target in range(size)])
        splits = [rank + target for target in range(size)]
        expected = torch.cat([part(source, rank) for source in range(size)])
        received = [source + rank for source in range(size)]
        output, counts = hvd.alltoall(mine, splits)
        assert_same(output, expected)
        assert counts.tolist() == received
        output, counts = hvd.synchronize(
            hvd.alltoall_async(mine, torch.tensor(splits, dtype=torch.int32))
        )
        assert_same(output, expected)
        assert counts.dtype == torch.int32


@case
def alltoall_evenly() -> None:
    mine = torch.arange(2 * hvd.size()) + 100 * hvd.rank()
    output = hvd.alltoall(mine)
    expected = [
        100 * source + 2 * hvd.rank() + i
        for source in range(hvd.size())
        for i in (0, 1)
    ]
    assert output.tolist() == expected


# -- reducescatter ---------------------------------------------------------------------


@case
def reducescatter() -> None:
    size, rank = hvd.size(), hvd.rank()
    for rows, width, dtype in itertools.product(
        (0, 1, size, 2 * size + 1), ((), (3,), (2, 2)), DTYPES
    ):
        mine = input_of((rows, *width), dtype, rank)
        total = sum(inputs_of_all((rows, *width), torch.float64))
        expected = total.tensor_split(size)[rank].to(dtype)
        assert_same(hvd.reducescatter(mine, op=hvd.Sum), expected)
        assert_same(mine, input_of((rows, *width), dtype, rank))
        handle = hvd.reducescatter_async(mine, op=hvd.Sum)
        assert_same(hvd.synchronize(handle), expected)
        if dtype == torch.float64:
            result = hvd.reducescatter(mine, prescale_factor=4.0, postscale_factor=0.5)
            assert_same(result, expected * 2 / size, rtol=1e-15)
    mine = input_of((size,), torch.int64, rank)
    both = hvd.grouped_reducescatter([mine, mine.double()], op=hvd.Max)
    for result in both:
        wanted = torch.stack(inputs_of_all((size,), result.dtype)).amax(0)[
            rank : rank + 1
        ]
        assert_same(result, wanted)


# -- gradients -------------------------------------------------------------------------


def leaves(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """One input for each rank, equal on all ranks, in double precision."""
    return [
        input_of(shape, torch.float64, rank).requires_grad_()
        for rank, shape in enumerate(shapes)
    ]


def weights(shape: tuple[int, ...]) -> list[Tensor]:
    """A factor for each rank's result. It is the gradient of the rank's loss."""
    return [input_of(shape, torch.float64, rank, salt=9) for rank in range(hvd.size())]


def assert_gradients(
    shapes: list[tuple[int, ...]],
    function: Callable[[Tensor], Tensor],
    on_one: Callable[[list[Tensor]], list[Tensor]],
    loss: Callable[[Tensor], Tensor],
) -> None:
    """Compare the gradients with autograd in one process.

    `on_one` computes the results of all ranks from the inputs of all ranks. `loss`
    combines the losses of the ranks.
    """
    rank = hvd.rank()
    everything = leaves(shapes)
    results = on_one(everything)
    factors = [
        input_of(tuple(y.shape), torch.float64, r, 9) for r, y in enumerate(results)
    ]
    losses = [(y * w).sum() for y, w in zip(results, factors, strict=True)]
    loss(torch.stack(losses)).backward()
    mine = leaves(shapes)[rank]
    output = function(mine)
    assert_same(output.detach(), results[rank].detach(), rtol=1e-12)
    (output * factors[rank]).sum().backward()
    assert_same(mine.grad, everything[rank].grad, rtol=1e-12)


@case
def allreduce_gradients() -> None:
    size = hvd.size()
    for op, scale in ((hvd.Sum, 1.0), (hvd.Average, 1 / size)):
        for shape in SHAPES:
            assert_gradients(
                [shape] * size,
                lambda x, op=op: hvd.allreduce(x, op=op),
                lambda xs, scale=scale: [sum(xs) * scale] * size,
                torch.sum,
            )
    assert_gradients(
        [(3,)] * size,
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3, postscale_factor=0.5),
        lambda xs: [sum(xs) * 1.5] * size,
        torch.sum,
    )
    assert_gradients(
        [(3,)] * size,
        lambda x: sum(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)),
        lambda xs: [sum(xs) * 3] * size,
        torch.sum,
    )


@case
def allgather_gradients() -> None:
    size = hvd.size()
    for width in ((), (2,), (2, 3)):
        assert_gradients(
            [(rank + 1, *width) for rank in range(size)],
            hvd.allgather,
            lambda xs: [torch.cat(xs)] * size,
            torch.mean,  # Horovod's convention for this one
        )


@case
def broadcast_gradients() -> None:
    size = hvd.size()
    for root, shape in itertools.product(range(size), SHAPES):
        assert_gradients(
            [shape] * size,
            lambda x, root=root: hvd.broadcast(x, root) + 0 * x,
            lambda xs, root=root: [xs[root] + 0 * x for x in xs],
            torch.mean,
        )


@case
def alltoall_gradients() -> None:
    size, rank = hvd.size(), hvd.rank()

    def exchanged(xs: list[Tensor]) -> list[Tensor]:
        pieces = [
            x.split([source + t for t in range(size)]) for source, x in enumerate(xs)
        ]
        return [torch.cat([row[target] for row in pieces]) for target in range(size)]

    assert_gradients(
        [(sum(source + t for t in range(size)), 2) for source in range(size)],
        lambda x: hvd.alltoall(x, [rank + t for t in range(size)])[0],
        exchanged,
        torch.sum,
    )


@case
def reducescatter_gradients() -> None:
    size = hvd.size()
    for op, scale in ((hvd.Sum, 1.0), (hvd.Average, 1 / size)):
        assert_gradients(
            [(2 * size + 1, 3)] * size,
            lambda x, op=op: hvd.reducescatter(x, op=op),
            lambda xs, scale=scale: list((sum(xs) * scale).tensor_split(size)),
            lambda losses: losses.sum() * size,  # Horovod's convention for this one
        )


# -- names, handles and order ----------------------------------------------------------


@case
def names_match_in_any_order() -> None:
    values = {name: float(at) for at, name in enumerate("abcdefgh")}
    order = sorted(values, key=lambda name: hash((values[name] + 1) * (hvd.rank() + 7)))
    handles = {
        name: hvd.allreduce_async(torch.full((3,), values[name]), name=name)
        for name in order
    }
    for name in reversed(order):
        assert hvd.synchronize(handles[name]).tolist() == [values[name]] * 3


@case
def names_match_across_operations() -> None:
    rank = hvd.rank()
    begin = [
        lambda: hvd.allgather_async(torch.full((rank + 1,), rank), name="x"),
        lambda: hvd.broadcast_async(torch.full((2,), rank), 0, name="x"),
        lambda: hvd.allreduce_async(torch.full((2,), rank), name="x", op=hvd.Sum),
    ]
    turned = [(i + rank) % 3 for i in range(3)]
    handles = {which: begin[which]() for which in turned}
    total = sum(range(hvd.size()))
    assert hvd.synchronize(handles[2]).tolist() == [total] * 2
    assert hvd.synchronize(handles[1]).tolist() == [0, 0]
    assert len(hvd.synchronize(handles[0])) == hvd.size() * (hvd.size() + 1) // 2


@case
def one_rank_is_late_with_a_name() -> None:
    first, second = ("early", "late") if hvd.rank() else ("late", "early")
    handle = hvd.allreduce_async(torch.ones(1), name=first)
    if hvd.rank() == 0:
        time.sleep(0.1)  # the others have sent their requests, and wait
    other = hvd.allreduce_async(torch.ones(1), name=second)
    assert hvd.synchronize(other).tolist() == [1.0]
    assert hvd.synchronize(handle).tolist() == [1.0]


@case
def poll_does_not_wait() -> None:
    names = ["p", "q"] if hvd.rank() % 2 else ["q", "p"]
    handles = [hvd.allreduce_async(torch.ones(1), name=name) for name in names]
    end = time.monotonic() + 60
    while not all(hvd.poll(handle) for handle in handles):
        assert time.monotonic() < end
        time.sleep(0.001)
    for handle in handles:
        assert hvd.synchronize(handle).tolist() == [1.0]
        assert hvd.synchronize(handle) is None
        with pytest.raises(ValueError, match="synchronized before"):
            hvd.poll(handle)


@case
def a_name_can_be_used_once_at_a_time() -> None:
    if hvd.size() == 1:
        return
    gate = None
    if hvd.rank() == 0:  # the others have not made it: it stays under way
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
        with pytest.raises(ValueError, match=r"'allreduce\.twice' is under way"):
            hvd.allreduce_async(torch.ones(1), name="twice")
        gate = hvd.broadcast_async(torch.ones(1), 0, name="go")
    else:
        hvd.broadcast(torch.ones(1), 0, name="go")
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
    hvd.synchronize(handle)
    if gate is not None:
        hvd.synchronize(gate)
    again = hvd.allreduce_async(torch.ones(1), name="twice")
    assert hvd.synchronize(again).tolist() == [1.0]


@case
def mismatches_name_the_calls() -> None:
    if hvd.size() == 1:
        return
    odd = hvd.rank() == 1
    for wrong in (
        lambda: hvd.allreduce(torch.ones(3 + odd)),
        lambda: hvd.allreduce(torch.ones(3, dtype=torch.float64 if odd else None)),
        lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum if odd else hvd.Max),
        lambda: hvd.broadcast(torch.ones(3), int(odd)),
        lambda: hvd.allgather(torch.ones(3, 1 + odd)),
        lambda: hvd.allreduce(torch.ones(3 + odd), name="shape"),
        lambda: hvd.allreduce(torch.ones(3), name=f"name {odd}"),
        lambda: hvd.allgather(torch.ones(3)) if odd else hvd.barrier(),
    ):
        with pytest.raises(CollectiveMismatch, match="no data was touched"):
            wrong()
        assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]  # usable as before


@case
def bad_arguments_are_refused() -> None:
    size = hvd.size()
    for wrong, text in (
        (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "only op"),
        (lambda: hvd.allreduce(torch.ones(1), op="sum"), "expected hvd.Average"),
        (lambda: hvd.allreduce([1.0]), "expected a tensor"),
        (lambda: hvd.allreduce(torch.ones(1, dtype=int), op=hvd.Adasum), "floating"),
        (lambda: hvd.grouped_allreduce([]), "at least one"),
        (lambda: hvd.allgather(torch.tensor(1)), "0-d"),
        (lambda: hvd.broadcast(torch.ones(1), size), "root_rank"),
        (lambda: hvd.alltoall(torch.ones(3), [3] * size + [0]), "add up"),
        (lambda: hvd.reducescatter(torch.ones(3), op=hvd.Adasum), "Adasum"),
    ):
        with pytest.raises(UsageError, match=text):
            wrong()
    with pytest.raises(RuntimeError, match="Adasum"):  # as in Horovod
        hvd.reducescatter(torch.ones(3), op=hvd.Adasum)
    if size > 1:
        with pytest.raises(UsageError, match="evenly"):
            hvd.alltoall(torch.ones(2 * size - 1))
    assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]


# -- join ------------------------------------------------------------------------------


@case
def join_contributes_zeros() -> None:
    size, rank = hvd.size(), hvd.rank()
    for step in range(rank + 1):
        left = size - step
        ones = torch.ones(2)
        assert hvd.allreduce(ones, op=hvd.Sum).tolist() == [left, left]
        assert hvd.allreduce(ones).tolist() == pytest.approx([left / size] * 2)
        assert hvd.allreduce(-ones, op=hvd.Max).tolist() == [-1, -1]
        assert hvd.allreduce(ones, op=hvd.Min).tolist() == [1, 1]
        assert hvd.allreduce(2 * ones, op=hvd.Product).tolist() == [2**left] * 2
        handle = hvd.allreduce_async(ones.long(), name="count", op=hvd.Sum)
        assert hvd.synchronize(handle).tolist() == [left, left]
        both = hvd.grouped_allreduce([ones, ones.double()], op=hvd.Sum)
        assert [each.tolist() for each in both] == [[left, left]] * 2
    assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(1)).tolist() == [1.0]  # all are back
    assert hvd.join() in range(size)


@case
def calls_that_cannot_continue_without_a_joined_rank() -> None:
    if hvd.size() == 1:
        return
    if hvd.rank():
        hvd.allreduce(torch.ones(1))
        for wrong in (
            lambda: hvd.allgather(torch.ones(1)),
            lambda: hvd.broadcast(torch.ones(1), 1),
            lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum),
        ):
            with pytest.raises(UnsupportedCollective, match="before any rank joins"):
                wrong()
    else:
        hvd.allreduce(torch.ones(1))
    hvd.join()
    hvd.barrier()


# -- process sets ----------------------------------------------------------------------


@case
def process_sets() -> None:
    size, rank = hvd.size(), hvd.rank()
    assert hvd.global_process_set.size() == size
    assert hvd.global_process_set.included()
    if size < 3:
        return
    even = hvd.add_process_set(hvd.ProcessSet(range(0, size, 2)))
    odd = hvd.add_process_set(list(range(1, size, 2)))
    assert hvd.get_process_set_ids_and_ranks() == {
        0: list(range(size)), even.process_set_id: list(range(0, size, 2)),
        odd.process_set_id: list(range(1, size, 2)),
    }  # fmt: skip
    own, other = (odd, even) if rank % 2 else (even, odd)
    assert own.included()
    assert own.rank() == rank // 2
    total = sum(own.ranks)
    mine = torch.tensor([float(rank)])
    assert hvd.allreduce(mine, op=hvd.Sum, process_set=own).item() == total
    assert hvd.allgather(mine, process_set=own).tolist() == own.ranks
    root = own.ranks[-1]
    assert hvd.broadcast(mine, root, process_set=own).item() == root
    with pytest.raises(UsageError, match="is not in the process set"):
        hvd.allreduce(mine, process_set=other)
    with pytest.raises(UsageError, match="is not in the process set"):
        other.rank()
    with pytest.raises(UsageError, match="root_rank"):
        hvd.broadcast(mine, other.ranks[0], process_set=own)
    with pytest.raises(UsageError, match="a process set already"):
        hvd.add_process_set([0, *range(2, size, 2)])
    assert hvd.remove_process_set(even)
    assert not hvd.remove_process_set(even)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(UsageError, match="not known"):
        hvd.allreduce(mine, process_set=even)
    assert hvd.remove_process_set(odd)


# -- objects and state -----------------------------------------------------------------


@case
def objects() -> None:
    for root in range(hvd.size()):
        mine = {"rank": hvd.rank(), "fn": lambda x, root=root: x + root}
        got = hvd.broadcast_object(mine, root, name=f"object {root}")
        assert got["rank"] == root
        assert got["fn"](1) == 1 + root
        assert (got is mine) == (hvd.rank() == root)
    assert hvd.broadcast_object_fn(0)(hvd.rank()) == 0
    expected = [[rank] * (rank * 100) for rank in range(hvd.size())]
    assert hvd.allgather_object([hvd.rank()] * (hvd.rank() * 100)) == expected


def layers() -> torch.nn.Module:
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(float(hvd.rank()))
    return net


@case
def parameters_are_broadcast() -> None:
    root = hvd.size() - 1
    for give in (
        lambda net: net.state_dict(),
        lambda net: net.named_parameters(),
        lambda net: net.parameters(),
        lambda net: list(net.named_parameters()),
    ):
        net = layers()
        hvd.broadcast_parameters(give(net), root_rank=root)
        for parameter in net.parameters():
            assert_same(parameter.detach(), torch.full_like(parameter, float(root)))
    with pytest.raises(ValueError, match="state_dict"):
        hvd.broadcast_parameters(3, root_rank=0)


@case
def optimizer_state_is_broadcast_by_value() -> None:
    makers = [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.3),
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.3, betas=(0.8, 0.9)),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ]
    for make in makers:
        for distributed, used in itertools.product((False, True), repeat=2):
            net = layers()
            optimizer = make(net.parameters())
            if hvd.rank() == 0 and used:
                net(torch.randn(5, 3)).square().sum().backward()
                optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.7
            if distributed:
                optimizer = hvd.DistributedOptimizer(optimizer)
            before = [each.detach().clone() for each in net.parameters()]
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for parameter, kept in zip(net.parameters(), before, strict=True):
                assert_same(parameter.detach(), kept)  # no step was taken
            states = hvd.allgather_object(optimizer.state_dict())
            for state in states[1:]:
                assert state["param_groups"] == states[0]["param_groups"]
                assert state["state"].keys() == states[0]["state"].keys()
                torch.testing.assert_close(
                    state["state"], states[0]["state"], check_device=False
                )
            assert states[0]["param_groups"][0]["lr"] == (0.7 if used else 0.1)


# -- the timeline ----------------------------------------------------------------------


@case
def timeline() -> None:
    with TemporaryDirectory() as folder:
        first, second = Path(folder, "first.json"), Path(folder, "second.json")
        hvd.start_timeline(first, mark_cycles=True)
        hvd.allreduce(torch.ones(3, 2), name="early")
        handles = [hvd.broadcast_async(torch.ones(5), 0, name=x) for x in "ab"]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.start_timeline(str(second))  # ends the first one
        if hvd.size() > 1:
            with pytest.raises(CollectiveMismatch):
                hvd.allreduce(torch.ones(2 + hvd.rank() % 2, 2), name="late")
        hvd.allgather(torch.ones(1), name="late")
        hvd.stop_timeline()
        hvd.stop_timeline()  # once more: nothing happens
        hvd.allreduce(torch.ones(1), name="never")
        if hvd.rank() > 0:
            assert not list(Path(folder).iterdir())
            return
        text = first.read_text() + second.read_text()
        assert "never" not in text
        assert "CYCLE_START" in first.read_text()
        assert "CYCLE_START" not in second.read_text()
        for path, calls in (
            (first, {"allreduce.early": "float32 [3, 2]"} | dict.fromkeys(
                ("broadcast.a", "broadcast.b"), "float32 [5]")),
            (second, {"allgather.late": "float32 [-1]"}),
        ):  # fmt: skip
            check_spans(json.loads(path.read_text()), calls)


def check_spans(events: list[dict[str, Any]], calls: dict[str, str]) -> None:
    """Check that each call has two spans, one directly after the other."""
    assert events[0]["args"]["start_time_since_epoch_in_micros"] > 1.6e15
    rows = {x["args"]["name"]: x["pid"] for x in events if x["name"] == "process_name"}
    for call, kind in calls.items():
        waits, moves = (x for x in events if x["pid"] == rows[call] and x["ph"] == "X")
        operation = call.partition(".")[0].upper()
        assert (waits["name"], moves["name"]) == (f"NEGOTIATE_{operation}", operation)
        found = f"{moves['args']['dtype']} {moves['args']['shape']}"
        assert found == kind, (found, kind)
        assert waits["ts"] >= 0
        assert waits["dur"] > 0
        assert moves["dur"] > 0
        assert abs(waits["ts"] + waits["dur"] - moves["ts"]) < 0.01


@case
def a_timeline_of_the_environment() -> None:
    hvd.shutdown()
    with TemporaryDirectory() as folder:
        path = Path(folder, "missing", "timeline.json")
        os.environ["HOROVOD_TIMELINE"] = str(path)
        try:
            if nbdist.rank() == 0:
                with pytest.raises(UsageError, match="missing"):
                    hvd.init()
                path.parent.mkdir()
            else:
                hvd.init()
            hvd.shutdown()
            hvd.init()
            hvd.allreduce(torch.ones(1), name="seen")
            hvd.shutdown()
        finally:
            del os.environ["HOROVOD_TIMELINE"]
        assert path.exists() == (nbdist.rank() == 0)
        if path.exists():
            assert "allreduce.seen" in path.read_text()
            json.loads(path.read_text())
    hvd.init()
