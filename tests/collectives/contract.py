"""The contract of every transport. `test_contract.py` runs this file on ranks.

Each rank's inputs come from its seed, so that every rank can compute the inputs of all
ranks, and a missing or doubled contribution is noticed. After each case the ranks
exchange their results over plain MPI.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator

import pytest
import simulated_transports
import torch
from mpi4py import MPI
from pretended_hosts import pretending_hosts
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

import nbdist.collectives as nc
from nbdist.config import CollectiveConfig
from nbdist.errors import CollectiveMismatch, UnsupportedCollective, UsageError

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (2,), (SIZE,), (7, 11), (1009,)]
LARGE = 700_001
OPS = ["sum", "mean", "product", "min", "max", "band", "bor", "bxor"]

Case = Callable[[nc.Group], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run_on_transports(
    transports: list[str], device: str = "cpu", own_gpus: bool = False
) -> dict[str, dict[str, list[str | None]]]:
    """`run_cases` for each transport, with all tensors on a kind of device.

    On GPUs, all ranks share the first one, unless each has its own.
    """
    if own_gpus:
        torch.cuda.set_device(RANK)
    torch.set_default_device(device)
    return {transport: run_cases(transport) for transport in transports}


def run_cases(transport: str) -> dict[str, list[str | None]]:
    """Run all cases. Returns each rank's error, by case."""
    is_simulated = transport in simulated_transports.MAKERS
    name, _, how = ("auto" if is_simulated else transport).partition(", ")
    config = CollectiveConfig(name, timeout_s=20.0, compiled=how != "in Python")
    with pretending_hosts(how):
        return _run_cases(config, transport, is_simulated)


def _run_cases(
    config: CollectiveConfig, transport: str, is_simulated: bool
) -> dict[str, list[str | None]]:
    group = nc.Group(COMM, config=config)
    if is_simulated:
        simulated_transports.install(transport, group)
    nc.set_default_group(group)
    outcomes = {}
    for name, function in CASES.items():
        error = None
        try:
            function(group)
        except BaseException:  # noqa: BLE001 - it is the outcome of the case
            error = traceback.format_exc()
        outcomes[name] = COMM.allgather(error)
        if any(COMM.allgather(group.broken)):
            group.renew(group.generation + 1)
            if is_simulated:
                simulated_transports.install(transport, group)
    group.close()
    return outcomes


# -- inputs and references -------------------------------------------------------------


def input_of(
    shape: tuple[int, ...], dtype: torch.dtype, rank: int, salt: int = 0
) -> Tensor:
    """The input of a rank, which every rank can compute."""
    seed = torch.Generator("cpu").manual_seed(1000 * salt + rank)
    return _random(shape, dtype, seed).to(torch.get_default_device())


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, seed: torch.Generator
) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape, generator=seed, device="cpu") < 0.7
    if not (dtype.is_floating_point or dtype.is_complex):
        low = 0 if dtype == torch.uint8 else -3
        return torch.randint(low, 4, shape, generator=seed, device="cpu").to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=seed, dtype=wide, device="cpu").to(dtype)


def all_made(shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> list[Tensor]:
    return [input_of(shape, dtype, rank, salt) for rank in range(SIZE)]


def reference(op: str, tensors: list[Tensor]) -> Tensor:
    """The exact result, in the widest dtype of the kind."""
    dtype = tensors[0].dtype
    wide = _widest(dtype)
    stack = torch.stack([tensor.to(wide) for tensor in tensors])
    if op in ("sum", "mean"):
        total = stack.any(0) if dtype == torch.bool else stack.sum(0)
        return total / SIZE if op == "mean" else total
    if op == "product":
        return stack.all(0) if dtype == torch.bool else stack.prod(0)
    if op in ("min", "max"):
        return (
            getattr(stack.to(torch.uint8), f"a{op}")(0).bool()
            if (dtype == torch.bool)
            else getattr(stack, f"a{op}")(0)
        )
    step = getattr(torch, f"bitwise_{op[1:]}")
    return _fold(step, list(stack))


def _fold(step: Callable[[Tensor, Tensor], Tensor], rows: list[Tensor]) -> Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = step(total, row)
    return total


def _widest(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return torch.float64
    if dtype.is_complex:
        return torch.complex128
    return torch.bool if dtype == torch.bool else torch.int64


def close_enough(op: str, got: Tensor, tensors: list[Tensor]) -> None:
    dtype = got.dtype
    exact = reference(op, tensors)
    if not (dtype.is_floating_point or dtype.is_complex) or op in ("min", "max"):
        assert torch.equal(got, exact.to(dtype)), (op, got, exact)
        return
    # (N-1) eps for the additions, one more eps for rounding the result to its dtype.
    steps = SIZE - 1 + (1 if op != "sum" or dtype in FLOATS[2:] else 0)
    wide = [tensor.to(exact.dtype).abs() for tensor in tensors]
    scale = _fold(torch.mul, wide) if op == "product" else _fold(torch.add, wide)
    if op == "mean":
        scale = scale / SIZE
    factor = 4.0 if dtype.is_complex else 1.0
    tiny = torch.finfo(dtype).tiny
    bound = factor * steps * torch.finfo(dtype).eps * scale + SIZE * tiny
    assert ((got.to(exact.dtype) - exact).abs() <= bound).all(), (op, dtype)


def same_on_all_ranks(tensor: Tensor) -> None:
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert len(set(COMM.allgather(hash_of(raw)))) == 1, "ranks hold different bits"


def hash_of(raw: bytes) -> str:
    import hashlib

    return hashlib.blake2b(raw).hexdigest()


def defined() -> Iterator[tuple[str, torch.dtype]]:
    for op, dtype in itertools.product(OPS, DTYPES):
        exact = not (dtype.is_floating_point or dtype.is_complex)
        if op == "mean" and exact:
            continue
        if op in ("min", "max") and dtype.is_complex:
            continue
        if op in ("band", "bor", "bxor") and not exact:
            continue
        yield op, dtype


# -- reductions ------------------------------------------------------------------------


@case
def all_reduce_every_op_and_dtype(group: nc.Group) -> None:
    # The second call of a kind takes a shorter way than the first.
    for (op, dtype), _ in itertools.product(defined(), range(2)):
        tensor = input_of((23,), dtype, RANK)
        nc.all_reduce(tensor, op)
        close_enough(op, tensor, all_made((23,), dtype))
        same_on_all_ranks(tensor)


@case
def all_reduce_every_shape(group: nc.Group) -> None:
    dtypes = [torch.float32, torch.int64]
    for shape, dtype, _ in itertools.product(SHAPES, dtypes, range(2)):
        tensor = input_of(shape, dtype, RANK, 1)
        nc.all_reduce(tensor)
        assert tensor.shape == shape
        close_enough("sum", tensor, all_made(shape, dtype, 1))


@case
def all_reduce_many_blocks(group: nc.Group) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        tensor = input_of((LARGE,), dtype, RANK, 2)
        nc.all_reduce(tensor)
        close_enough("sum", tensor, all_made((LARGE,), dtype, 2))
        same_on_all_ranks(tensor)


@case
def all_reduce_every_algorithm(group: nc.Group) -> None:
    for algorithm, length in itertools.product(("ring", "mpi", "auto"), (3, 10_007)):
        tensor = input_of((length,), torch.float32, RANK, 3)
        nc.all_reduce(tensor, "mean", algorithm=algorithm)
        close_enough("mean", tensor, all_made((length,), torch.float32, 3))
        same_on_all_ranks(tensor)


@case
def all_reduce_with_compression(group: nc.Group) -> None:
    """The results of all ranks have the same bits, and are exact on one host."""
    hosts = len(set(group.hosts))
    for codec, error in (("bf16", 2**-7), ("int8", 1 / 100)):
        for length in (10, 4096, 70_001) if hosts > 1 else (4096,):
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
                tensor = input_of((length,), dtype, RANK, 7)
                exact = input_of((length,), dtype, RANK, 7)
                nc.all_reduce(tensor, compression=codec)
                nc.all_reduce(exact)
                same_on_all_ranks(tensor)
                largest = exact.abs().max().item()
                allowed = error * largest if dtype.is_floating_point else 0.0
                if hosts == 1 or length < 4096 or dtype == torch.float64:
                    allowed = 0.0
                difference = (tensor.double() - exact.double()).abs().max().item()
                assert difference <= allowed, (codec, length, dtype, difference)


@case
def int8_corrects_its_errors_in_the_next_call(group: nc.Group) -> None:
    """The sum of many calls has the error of one."""
    if len(set(group.hosts)) == 1:
        return
    inputs = all_made((5000,), torch.float32, 8)
    tensor, total = torch.empty(5000), torch.zeros(5000, dtype=torch.float64)
    for _ in range(20):
        tensor.copy_(inputs[RANK])
        nc.all_reduce(tensor, compression="int8")
        total += tensor.cpu()
    exact = 20 * sum(each.double().cpu() for each in inputs)
    largest = sum(each.abs().max().item() for each in inputs)
    assert (total - exact).abs().max().item() < largest / 60, "the errors add up"


@case
def compression_keeps_what_is_not_finite_to_its_call(group: nc.Group) -> None:
    if len(set(group.hosts)) == 1:
        return
    tensor = torch.ones(5000)
    tensor[4321] = float("nan") if RANK == SIZE - 1 else 1.0
    nc.all_reduce(tensor, compression="int8")
    assert tensor[4321].isnan()
    assert tensor[0].item() == pytest.approx(SIZE, rel=0.01)
    tensor.fill_(1.0)
    nc.all_reduce(tensor, compression="int8")
    assert tensor.isfinite().all()
    same_on_all_ranks(tensor)


@case
def ranks_that_differ_in_compression_are_a_mismatch(group: nc.Group) -> None:
    if len(set(group.hosts)) == 1:
        return
    tensor = torch.ones(5000)
    with pytest.raises(CollectiveMismatch, match="sum by int8"):
        nc.all_reduce(tensor, compression="int8" if RANK == 0 else None)
    assert tensor.sum().item() == 5000


@case
def all_reduce_of_views(group: nc.Group) -> None:
    whole = input_of((12, 10), torch.float64, RANK, 4)
    wholes = all_made((12, 10), torch.float64, 4)
    views: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.T,
        lambda t: t[::2],
        lambda t: t[:, 3],
        lambda t: t[2:5, 1:4],
        lambda t: t.view(3, 4, 10).permute(2, 0, 1),
    ]
    for view in views:
        tensor = whole.clone()
        nc.all_reduce(view(tensor))
        expected = whole.clone()
        view(expected).copy_(reference("sum", [view(each) for each in wholes]))
        assert torch.allclose(tensor, expected, rtol=1e-12), "a view was missed"


@case
def all_reduce_one_hot(group: nc.Group) -> None:
    for length in (SIZE, 5 * SIZE + 1, 40_000):
        tensor = torch.zeros(length)
        tensor[RANK::SIZE] = RANK + 1.0
        nc.all_reduce(tensor)
        assert torch.equal(tensor, (torch.arange(length) % SIZE) + 1.0)


@case
def all_reduce_cancelling_values(group: nc.Group) -> None:
    tensors = [
        torch.full((1000,), 1e8 * (-1) ** rank) + torch.arange(1000) * 1e-3
        for rank in range(SIZE)
    ]
    tensor = tensors[RANK].clone()
    nc.all_reduce(tensor)
    close_enough("sum", tensor, tensors)
    same_on_all_ranks(tensor)


@case
def nan_and_infinity_are_reduced(group: nc.Group) -> None:
    for op, dtype in itertools.product(("sum", "min", "max", "product"), FLOATS):
        tensor = torch.ones(4 * SIZE, dtype=dtype)
        tensor[RANK] = float("nan")
        tensor[SIZE + RANK] = float("inf")
        tensor[2 * SIZE + RANK] = float("-inf")
        nc.all_reduce(tensor, op)
        assert tensor[:SIZE].isnan().all(), (op, dtype, tensor)
        lowest, highest = tensor[2 * SIZE : 3 * SIZE], tensor[SIZE : 2 * SIZE]
        if op != "min" or SIZE == 1:
            assert (highest == float("inf")).all(), (op, dtype)
        if op != "max" or SIZE == 1:
            assert (lowest == float("-inf")).all(), (op, dtype)


@case
def integers_wrap_as_in_torch(group: nc.Group) -> None:
    tensor = torch.full((100,), 100, dtype=torch.int8)
    nc.all_reduce(tensor)
    assert (tensor == torch.tensor(100 * SIZE).to(torch.int8)).all()


@case
def reduce_to_every_root(group: nc.Group) -> None:
    for root, length in itertools.product(range(SIZE), (0, 5, 30_001)):
        tensor = input_of((length,), torch.float32, RANK, 5)
        nc.reduce(tensor, root, "sum")
        if root == RANK:
            close_enough("sum", tensor, all_made((length,), torch.float32, 5))
        else:
            assert torch.equal(tensor, input_of((length,), torch.float32, RANK, 5))


@case
def reduce_scatter_lists_and_tensors(group: nc.Group) -> None:
    for length, dtype in itertools.product((0, 1, 13, 200_003), (FLOATS[1], FLOATS[3])):
        inputs = input_of((SIZE, length), dtype, RANK, 6)
        mine = [each[RANK] for each in all_made((SIZE, length), dtype, 6)]
        output = torch.empty(length, dtype=dtype)
        nc.reduce_scatter(output, list(inputs))
        close_enough("sum", output, mine)
        nc.reduce_scatter_tensor(output, inputs, "max")
        close_enough("max", output, mine)
        assert torch.equal(inputs, input_of((SIZE, length), dtype, RANK, 6)), (
            "input changed"
        )


# -- moving ----------------------------------------------------------------------------


@case
def broadcast_from_every_root(group: nc.Group) -> None:
    for root, dtype in itertools.product(range(SIZE), DTYPES):
        tensor = input_of((3, 5), dtype, RANK, 7)
        nc.broadcast(tensor, root)
        assert torch.equal(tensor, input_of((3, 5), dtype, root, 7))
    tensor = input_of((LARGE,), torch.float32, RANK, 8)
    nc.broadcast(tensor, SIZE - 1)
    assert torch.equal(tensor, input_of((LARGE,), torch.float32, SIZE - 1, 8))


@case
def all_gather_lists_and_tensors(group: nc.Group) -> None:
    for length, dtype in itertools.product(
        (0, 1, 17, 150_001), (FLOATS[1], torch.bool)
    ):
        expected = torch.stack(all_made((length,), dtype, 9))
        outputs = [torch.empty(length, dtype=dtype) for _ in range(SIZE)]
        nc.all_gather(outputs, input_of((length,), dtype, RANK, 9))
        assert torch.equal(torch.stack(outputs), expected)
        joined = torch.empty(SIZE * length, dtype=dtype)
        nc.all_gather_into_tensor(joined, input_of((length,), dtype, RANK, 9))
        assert torch.equal(joined, expected.view(-1))


@case
def gather_and_scatter_at_every_root(group: nc.Group) -> None:
    for root, length in itertools.product(range(SIZE), (0, 3, 90_001)):
        mine = input_of((length,), torch.float64, RANK, 10)
        everyones = all_made((length,), torch.float64, 10)
        room = [torch.empty_like(mine) for _ in range(SIZE)] if root == RANK else None
        nc.gather(mine, room, root)
        if room is not None:
            assert all(map(torch.equal, room, everyones))
        output = torch.empty_like(mine)
        nc.scatter(output, everyones if root == RANK else None, root)
        assert torch.equal(output, mine)


@case
def one_element_of_any_stride(group: nc.Group) -> None:
    """Such a tensor counts as contiguous."""
    tensor = torch.tensor([RANK + 1.0, -1.0])[::2]
    nc.all_reduce(tensor)
    assert tensor.item() == SIZE * (SIZE + 1) / 2
    nc.broadcast(tensor, SIZE - 1)
    rows = [torch.zeros(2)[::2] for _ in range(SIZE)]
    nc.all_gather(rows, tensor)
    nc.scatter(tensor, rows if RANK == 0 else None, 0)
    nc.all_to_all(rows, [tensor[::3] for _ in range(SIZE)])
    assert all(row.item() == SIZE * (SIZE + 1) / 2 for row in rows)


@case
def all_to_all_even_and_uneven(group: nc.Group) -> None:
    lengths = [[(3 * i + 5 * j) % 7 * 4001 for j in range(SIZE)] for i in range(SIZE)]
    inputs = [_parcel(RANK, target, lengths) for target in range(SIZE)]
    outputs = [torch.empty(lengths[source][RANK]) for source in range(SIZE)]
    nc.all_to_all(outputs, inputs)
    for source, output in enumerate(outputs):
        assert torch.equal(output, _parcel(source, RANK, lengths))
    joined = torch.empty(sum(map(len, outputs)))
    nc.all_to_all_single(
        joined, torch.cat(inputs), [len(each) for each in outputs], lengths[RANK]
    )
    assert torch.equal(joined, torch.cat(outputs))
    even = torch.arange(2 * SIZE) + 100 * RANK
    received = torch.empty_like(even)
    nc.all_to_all_single(received, even)
    expected = [torch.arange(2) + 2 * RANK + 100 * source for source in range(SIZE)]
    assert torch.equal(received, torch.cat(expected))


def _parcel(source: int, target: int, lengths: list[list[int]]) -> Tensor:
    return input_of(
        (lengths[source][target],), torch.float32, SIZE * source + target, 11
    )


@case
def objects_are_gathered_and_broadcast(group: nc.Group) -> None:
    root = SIZE - 1
    assert nc.broadcast_object({"from": RANK}, root) == {"from": root}
    everyones = nc.all_gather_object("x" * 10_000 * RANK)
    assert everyones == ["x" * 10_000 * rank for rank in range(SIZE)]


@case
def a_default_device_has_no_effect(group: nc.Group) -> None:
    given = torch.arange(2 * SIZE, device="cpu")
    with torch.device("meta"):
        objects_are_gathered_and_broadcast(group)
        received = torch.empty_like(given)
        nc.all_to_all_single(received, given)
        for length in (8, 5000, 70_000):
            for dtype in (torch.float32, torch.bfloat16, torch.int16):
                ones = torch.ones(length, dtype=dtype, device="cpu")
                nc.all_reduce(ones, compression="int8")
                nc.all_reduce(ones, "max")
                nc.broadcast(ones, 0)
                assert ones.sum().item() == pytest.approx(length * SIZE, rel=0.01)
    expected = [torch.arange(2, device="cpu") + 2 * RANK] * SIZE
    assert torch.equal(received, torch.cat(expected))


@case
def messages_keep_their_order_and_tags(group: nc.Group) -> None:
    if SIZE == 1:
        return
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    sent = [
        nc.isend(torch.tensor([RANK, index]), right, tag=index % 2)
        for index in range(6)
    ]
    room = [torch.empty(2, dtype=torch.int64) for _ in range(6)]
    for index in (1, 3, 5, 0, 2, 4):
        nc.irecv(room[index], left, tag=index % 2).wait()
    for message in sent:
        message.wait()
    assert [each.tolist() for each in room] == [[left, index] for index in range(6)]


@case
def receive_from_any_rank(group: nc.Group) -> None:
    if RANK == 0:
        got = set()
        for _ in range(SIZE - 1):
            room = torch.empty(3, 3).T[1:]
            source = nc.recv(room, tag=9)
            assert (room == source).all()
            got.add(source)
        assert got == set(range(1, SIZE))
    else:
        nc.send(torch.full((2, 3), float(RANK)), 0, tag=9)


# -- order, groups, refusals -----------------------------------------------------------


@case
def asynchronous_calls_keep_their_order(group: nc.Group) -> None:
    tensors = [torch.full((1000,), float(i)) for i in range(20)]
    handles = [nc.all_reduce(each, async_op=True) for each in tensors]
    last = torch.ones(3)
    nc.all_reduce(last)  # waits for its turn
    assert all(handle is not None and handle.is_completed() for handle in handles)
    assert [each[0].item() for each in tensors] == [i * SIZE for i in range(20)]
    assert (last == SIZE).all()


@case
def subgroups(group: nc.Group) -> None:
    for chosen in ([0], list(range(SIZE)), list(range(SIZE))[::-2]):
        part = group.new(chosen)
        assert (part is not None) == (RANK in chosen)
        if part is not None:
            assert part.ranks == tuple(chosen)
            tensor = torch.tensor([RANK + 1])
            nc.all_reduce(tensor, group=part)
            assert tensor.item() == sum(chosen) + len(chosen)
            tensor = torch.tensor([RANK])
            nc.broadcast(tensor, chosen[-1], group=part)
            assert tensor.item() == chosen[-1]
            part.close()


@case
def undefined_operations_are_refused_before_anything_is_sent(group: nc.Group) -> None:
    before = group.sequence
    for op, dtype in itertools.product(OPS, DTYPES):
        if (op, dtype) not in set(defined()):
            refused(
                UnsupportedCollective, nc.all_reduce, torch.ones(2, dtype=dtype), op
            )
    refused(UnsupportedCollective, nc.all_reduce, torch.eye(3).to_sparse())
    refused(UsageError, nc.all_reduce, torch.ones(2), "average")
    refused(UsageError, nc.all_reduce, [1.0])
    refused(UsageError, nc.broadcast, torch.ones(2), SIZE)
    refused(UsageError, nc.all_gather, [torch.ones(2)] * (SIZE + 1), torch.ones(2))
    refused(UsageError, nc.reduce_scatter, torch.ones(2), [torch.ones(3)] * SIZE)
    refused(UsageError, nc.all_to_all_single, torch.ones(2), torch.ones(2), [3], [3])
    assert group.sequence == before


class Named(Tensor):
    """A subclass of Tensor with memory, like Parameter."""


@case
def subclasses_with_memory_are_accepted(group: nc.Group) -> None:
    arrived = input_of((6,), torch.float32, RANK, 20)
    pending = AsyncCollectiveTensor(arrived)
    named = input_of((6,), torch.float32, RANK, 20).as_subclass(Named)
    parameter = torch.nn.Parameter(input_of((6,), torch.float32, RANK, 20))
    for tensor in (pending, named, parameter) * 2:
        tensor.data.copy_(input_of((6,), torch.float32, RANK, 20))
        nc.all_reduce(tensor)
        plain = arrived if tensor is pending else tensor.detach().as_subclass(Tensor)
        close_enough("sum", plain, all_made((6,), torch.float32, 20))


@case
def tensors_without_memory_are_refused_before_anything_is_sent(
    group: nc.Group,
) -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(4)
    shadow = TwoTensor(torch.ones(4), torch.ones(4))
    meta = torch.ones(4, device="meta")
    like = torch.ones(4)
    nc.all_reduce(like)  # tensors of this kind are known
    before = group.sequence
    for tensor in (shadow, fake):
        refused(UnsupportedCollective, nc.all_reduce, tensor)
        refused(UnsupportedCollective, nc.broadcast, tensor)
        refused(UnsupportedCollective, nc.all_gather, [tensor] * SIZE, like)
        refused(UnsupportedCollective, nc.isend, tensor, RANK)
    for call in (nc.all_reduce, nc.broadcast, nc.reduce):
        message = refused(UsageError, call, meta)
        assert "meta" in message
    refused(UsageError, nc.isend, meta, RANK)
    refused(UsageError, nc.broadcast, freed)
    assert "has no memory" in refused(UsageError, nc.all_reduce, freed)
    assert group.sequence == before
    nc.all_reduce(like)


@case
def results_are_not_written_to_shared_elements(group: nc.Group) -> None:
    row, like = torch.ones(1).expand(4), torch.ones(4)
    before = group.sequence
    everyone = range(SIZE)
    for call, *arguments in (
        (nc.all_reduce, row),
        (nc.all_gather, [row for _ in everyone], like),
        (nc.all_to_all, [row for _ in everyone], [like for _ in everyone]),
        (nc.reduce_scatter, row, [like for _ in everyone]),
        (nc.scatter, row, [like for _ in everyone]),
        (nc.reduce, row, RANK),
        (nc.irecv, row, RANK),
    ):
        assert "strides (0,)" in refused(UsageError, call, *arguments)
    assert group.sequence == before
    outputs = [torch.empty(4) for _ in everyone]
    nc.all_gather(outputs, row)  # an input may be such a tensor
    nc.broadcast(row if RANK == 0 else outputs[0], 0)
    assert all((each == 1).all() for each in outputs)


def refused(
    error: type[Exception], function: Callable[..., object], *args: object
) -> str:
    with pytest.raises(error) as refusal:
        function(*args)
    return str(refusal.value)


# -- mismatches ------------------------------------------------------------------------


def _mismatches() -> dict[str, Callable[[], object]]:
    """Calls that differ on the last rank."""
    odd = RANK == SIZE - 1
    calls = [nc.barrier, lambda: nc.all_reduce(torch.ones(3))]
    return {
        "shape": lambda: nc.all_reduce(torch.ones(4 if odd else 3)),
        "dtype": lambda: nc.all_reduce(
            torch.ones(3, dtype=torch.float64 if odd else torch.float32)
        ),
        "op": lambda: nc.all_reduce(torch.ones(3), "max" if odd else "sum"),
        "root": lambda: nc.broadcast(torch.ones(3), 1 if odd else 0),
        "operation": lambda: (nc.reduce if odd else nc.broadcast)(torch.ones(3), 0),
        "order": calls[1] if odd else calls[0],
        "lengths": lambda: nc.all_to_all_single(
            torch.ones(SIZE + odd), torch.ones(SIZE), [1] * (SIZE - 1) + [1 + odd]
        ),
    }


@case
def mismatches_are_raised_on_all_ranks_before_data_is_changed(group: nc.Group) -> None:
    if SIZE == 1:
        return
    for _ in range(500 if group.config.transport == "shared" else 50):
        nc.all_reduce(torch.ones(3))
    for name, call in _mismatches().items():
        start = MPI.Wtime()
        message = refused(CollectiveMismatch, call)
        assert MPI.Wtime() - start < 2.0, name
        assert "no data was touched" in message, name
        if name == "shape":
            assert all(part in message for part in ("(3,)", "(4,)", "line")), message
        tensor = torch.ones(3)
        nc.all_reduce(tensor)
        assert (tensor == SIZE).all(), name


@case
def a_mismatch_does_not_change_the_tensor(group: nc.Group) -> None:
    if SIZE == 1:
        return
    for length in (5, LARGE):
        tensor = torch.full((length + (RANK == 0),), float(RANK))
        refused(CollectiveMismatch, nc.all_reduce, tensor)
        assert (tensor == RANK).all()
