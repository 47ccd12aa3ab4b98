"""The calls of `cuda_draws.py` on ranks. `test_random_calls_on_gpus.py` runs this file.

Each rank computes the inputs of all ranks on the CPU, and with torch's own functions
what each of its tensors must hold after the call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

import nbdist.collectives as nc
from nbdist.collectives.transports import cuda_ipc
from nbdist.config import CollectiveConfig
from nbdist.errors import CollectiveAborted, CollectiveMismatch

sys.path.insert(0, str(Path(__file__).parent))
from cuda_draws import GPUS, RANKS, STREAMS, Call, Draw, draw

COMM = MPI.COMM_WORLD
RANK = COMM.rank
TICKS_OF_A_MS = 2_000_000
GARBAGE = 77
TRANSPORTED = (
    "all_reduce_flat", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather",
    "scatter", "all_to_all",
)  # fmt: skip
LIMIT_S = 60
"""The longest time of a draw: it waits at most 30 s for another rank."""
EVERYONE = range(RANKS)
REDUCED = {
    "sum": torch.add, "mean": torch.add, "product": torch.mul, "min": torch.minimum,
    "max": torch.maximum, "band": torch.bitwise_and, "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}  # fmt: skip


class Injected(Exception):
    """The failure of a rank in the middle of a call."""


def run(seeds: list[int]) -> tuple[int, str] | None:
    """Make draws until one fails on a rank. Returns its seed and this rank's error."""
    cuda_ipc._SLOTS_OF_MEMORY, cuda_ipc._LEAST_SLOT = 500_000, 4096
    released = _Released()
    for seed in seeds:
        drawn = draw(seed)
        if RANK == 0:
            print(drawn, flush=True)  # the test shows the last one if a rank hangs
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        error = ""
        try:
            _Rank(drawn, released).make()
        except BaseException:  # noqa: BLE001 - it is the outcome
            error = traceback.format_exc()
            print(f"rank {RANK}: {error}", flush=True)  # also if the others hang
        if any(COMM.allgather(error)):
            return seed, error
    return None


class _Released:
    """Releases the other ranks from a call, as the notebook does after a failure."""

    def __init__(self) -> None:
        folder = Path(COMM.bcast(os.environ["TMPDIR"]))
        self._files = [folder / f"released-{rank}" for rank in EVERYONE]
        os.mkfifo(self._files[RANK])
        self._mine = os.open(self._files[RANK], os.O_RDWR)
        COMM.Barrier()

    @contextlib.contextmanager
    def waiting(self, group: nc.Group) -> Iterator[None]:
        """Abort the group when a rank tells; the block ends after that."""

        def wait() -> None:
            os.read(self._mine, 1)
            group.abort(CollectiveAborted("another rank has failed"))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        yield
        thread.join(30)

    def tell(self) -> None:
        for rank in EVERYONE:
            if rank != RANK:
                with self._files[rank].open("wb") as file:
                    file.write(b"x")


@dataclass
class _Made:
    """A call's tensors on this rank."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    expected: list[Tensor]
    """What inputs and outputs hold after the call."""
    before: list[Tensor]
    """What they held before."""
    function: Callable[..., nc.Handle | None]


class _Rank:
    """This rank in a draw."""

    def __init__(self, drawn: Draw, released: _Released) -> None:
        self._draw, self._released = drawn, released
        self._gpu = torch.device("cuda", drawn.gpus[RANK])
        self._elsewhere = torch.device("cuda", (drawn.gpus[RANK] + 1) % GPUS)
        self._streams = _streams(drawn.gpus[RANK])
        self._pending: list[tuple[Call, _Made, nc.Handle]] = []
        self._read: list[tuple[Call, list[Tensor], list[Tensor]]] = []

    def make(self) -> None:
        """Make the calls, and compare the values at the end."""
        torch.cuda.set_device(self._gpu)
        torch.cuda.set_per_process_memory_fraction(self._draw.memory[RANK], self._gpu)
        size = self._draw.slot_bytes
        config = CollectiveConfig(
            self._draw.transport,
            30.0,
            gpu_slot_bytes=size or None,
            staging_bytes=size or 12288,
        )
        self._group = nc.Group(COMM, config=config)
        nc.set_default_group(self._group)
        try:
            failure = self._draw.failure
            *others, last = self._draw.calls
            for number, call in enumerate(others if failure else self._draw.calls):
                self._call(call, number)
            self._finish()
            if failure:
                if self._draw.transport == "nccl":  # an abort ends its queued work
                    torch.cuda.synchronize(self._gpu)
                    COMM.Barrier()
                self._fail(last)
                self._call(self._draw.calls[0], len(others) + 1)
                self._finish()
            torch.cuda.synchronize(self._gpu)
            for call, got, expected in self._read:
                _compare(call, got, expected)
        finally:
            nc.close_groups()

    def _call(self, call: Call, number: int) -> None:
        made = self._prepared(call, number)
        with self._on(call, call.called_on):
            handle = made.function(async_op=call.is_async)
        if handle is None:
            self._consume(call, made)
        else:
            self._pending.append((call, made, handle))

    def _finish(self) -> None:
        for call, made, handle in self._pending:
            handle.wait()
            self._consume(call, made)
        self._pending.clear()

    def _consume(self, call: Call, made: _Made) -> None:
        """Read the results on a stream, and then overwrite all tensors."""
        reader = self._streams[call.read_on[RANK]]
        if not call.is_async:  # otherwise any stream can use the results
            reader.wait_stream(self._streams[call.called_on[RANK]])
        with torch.cuda.stream(reader):
            tensors = [*made.inputs, *made.outputs]
            self._read.append((call, [each.clone() for each in tensors], made.expected))
            for each in tensors:
                each.fill_(GARBAGE)
                each.record_stream(reader)

    # -- failures ------------------------------------------------------------------

    def _fail(self, call: Call) -> None:
        """Make the last call, in which a rank fails, and make the group whole again."""
        wrong = ""  # what this rank has found
        made = self._prepared(call, len(self._draw.calls) - 1)
        try:
            if self._draw.failure == "one leaves it out":
                self._leave_out(call, made)
            else:
                self._break(call, made)
        except BaseException:  # noqa: BLE001 - the other ranks wait
            wrong = traceback.format_exc()
        assert not any(COMM.allgather(wrong)), wrong
        if self._group.broken:
            self._group.renew(self._group.generation + 1)

    def _leave_out(self, call: Call, made: _Made) -> None:
        """All ranks but one make the call; that one makes another call."""
        leaves = self._draw.failing == RANK
        with self._on(call, call.called_on):
            error = self._error_of(call, nc.barrier if leaves else made.function)
        assert isinstance(error, CollectiveMismatch), error
        self._keeps(call, made)

    def _break(self, call: Call, made: _Made) -> None:
        """Make the call, in which one rank raises; the others are then released."""
        is_failing = self._draw.failing == RANK
        is_begun = self._draw.failure == "one fails in the middle"
        error = None
        with contextlib.ExitStack() as stack:
            if is_failing:
                stack.callback(self._group.abort, CollectiveAborted("this rank failed"))
                stack.callback(self._released.tell)
            else:
                stack.enter_context(self._released.waiting(self._group))
            if is_failing and is_begun:
                self._inject(call)
            with self._on(call, call.called_on):
                if not is_failing or is_begun:
                    error = self._error_of(call, made.function)
                sizes = [
                    each.untyped_storage().nbytes()
                    for each in (*made.inputs, *made.outputs)
                ]
                if is_begun and error is not None:  # the user drops the tensors
                    made.inputs.clear()
                    made.outputs.clear()
                scratch = [  # enough to get their memory
                    torch.full((size,), 5, dtype=torch.uint8, device=self._gpu)
                    for size in 4 * sizes
                ]
            if is_failing:
                assert self._group.broken == (error is not None)
        has_one_step = is_begun and error is None and self._draw.step == 2
        if is_failing and is_begun:
            assert isinstance(error, Injected) or has_one_step, error
        elif not is_failing:
            assert error is None or isinstance(error, CollectiveAborted), error
        if not is_failing and not is_begun:
            assert error is not None
            self._keeps(call, made)
        elif error is None and is_begun and self._draw.transport != "nccl":
            self._consume(call, made)
        torch.cuda.synchronize(self._gpu)
        for each in scratch:
            assert (each == 5).all(), "memory was reused too early"

    def _error_of(
        self, call: Call, function: Callable[..., nc.Handle | None]
    ) -> BaseException | None:
        try:
            handle = function(async_op=call.is_async)
            if handle is not None:
                handle.wait()
        except (Injected, CollectiveAborted, CollectiveMismatch) as error:
            return error.with_traceback(None)  # whose frames hold the call's memory
        return None

    def _keeps(self, call: Call, made: _Made) -> None:
        """Check that a call that has not begun on all ranks has changed nothing."""
        torch.cuda.synchronize(self._gpu)
        _compare(call, [*made.inputs, *made.outputs], made.before)

    def _inject(self, call: Call) -> None:
        """Have a step of the transport fail on this rank."""
        transport: Any = self._group.transport(self._gpu)
        step = 1 if call.length <= 1 else self._draw.step
        if self._draw.transport == "ipc":
            transport._pass = _failing(transport._pass, step, call)
        elif self._draw.transport == "nccl":
            for name in TRANSPORTED:  # the others' work is queued, and waits
                setattr(transport, name, _failing(print, 1, call))
        else:
            transport._host = _Failing(transport._host, step, call)

    # -- tensors -------------------------------------------------------------------

    @contextlib.contextmanager
    def _on(self, call: Call, streams: tuple[int, ...]) -> Iterator[None]:
        """Make a stream current, after the work on the stream of the inputs."""
        stream = self._streams[streams[RANK]]
        stream.wait_stream(self._streams[call.made_on[RANK]])
        with torch.cuda.stream(stream):
            device = self._elsewhere if call.elsewhere[RANK] else self._gpu
            with torch.cuda.device(device):
                yield

    def _late(self, call: Call, values: list[Tensor], strided: bool) -> list[Tensor]:
        """Tensors that get their values after a long kernel."""
        with torch.cuda.stream(self._streams[call.made_on[RANK]]):
            held = [each.to(self._gpu) for each in values]
            made = [_room(len(each), each.dtype, self._gpu, strided) for each in values]
            torch.cuda._sleep(call.late_ms[RANK] * TICKS_OF_A_MS)
            for tensor, each in zip(made, held, strict=True):
                tensor.copy_(each)
        return made

    def _prepared(self, call: Call, number: int) -> _Made:
        parts = _parts(self._draw.seed, number, call)
        inputs, outputs, expected, takes_strided = _model(call, parts)
        strided = call.strided[RANK] and takes_strided
        before = [*inputs, *outputs]
        on_gpu = self._late(call, before, strided)
        given, room = on_gpu[: len(inputs)], on_gpu[len(inputs) :]
        function = functools.partial(_made_call, call, given, room, parts)
        return _Made(given, room, expected, before, function)


@functools.cache
def _streams(gpu: int) -> list[torch.cuda.Stream]:
    others = [torch.cuda.Stream(gpu) for _ in range(STREAMS - 1)]
    return [torch.cuda.default_stream(gpu), *others]


def _room(
    length: int, dtype: torch.dtype, device: torch.device, strided: bool
) -> Tensor:
    whole = torch.full((2 * length,), GARBAGE, device=device).to(dtype)
    return whole[::2] if strided else whole[:length]


def _parts(seed: int, number: int, call: Call) -> list[list[Tensor]]:
    """`parts[a][b]`: what rank a gives for rank b. Small numbers and some NaN."""
    table = []
    for source in EVERYONE:
        generator = torch.Generator().manual_seed(1000 * seed + 10 * number + source)
        row = []
        for _ in EVERYONE:
            length = call.length
            if call.operation.startswith("all_to_all"):
                choices = [0, 1, length // 2, length]
                length = choices[int(torch.randint(4, (), generator=generator))]
            low = 0 if call.dtype in (torch.uint8, torch.bool) else -3
            high = 2 if call.dtype == torch.bool else 4
            part = torch.randint(low, high, (length,), generator=generator)
            part = part.to(call.dtype)
            if call.odd and source == call.odd_rank:
                part[length // 2 :: 5] = float(call.odd)
            row.append(part)
        table.append(row)
    return table


def _reduced(call: Call, rows: list[Tensor]) -> Tensor:
    if call.dtype == torch.bool:  # as the numbers 0 and 1
        rows = [each.to(torch.int64) for each in rows]
    total = functools.reduce(REDUCED[call.op], rows)
    if call.op == "mean":
        return total / RANKS
    return total.bool() if call.dtype == torch.bool else total


def _model(
    call: Call, parts: list[list[Tensor]]
) -> tuple[list[Tensor], list[Tensor], list[Tensor], bool]:
    """This rank's inputs, outputs before the call, both after it, and their layout.

    Of an operation that works in place, the tensor is an input. The last value is
    whether the tensors need not be contiguous.
    """
    firsts = [row[0] for row in parts]
    mine, column = firsts[RANK], [row[RANK] for row in parts]
    is_root = call.root == RANK

    def empty(like: list[Tensor]) -> list[Tensor]:
        return [torch.full_like(each, 1) for each in like]

    match call.operation:
        case "all_reduce":
            return [mine], [], [_reduced(call, firsts)], True
        case "reduce":
            return [mine], [], [_reduced(call, firsts) if is_root else mine], True
        case "broadcast":
            return [mine], [], [firsts[call.root]], True
        case "all_gather":
            return [mine], empty(firsts), [mine, *firsts], True
        case "all_gather_into_tensor":
            whole = [torch.cat(firsts)]
            return [mine], empty(whole), [mine, *whole], False
        case "gather":
            rows = firsts if is_root else []
            return [mine], empty(rows), [mine, *rows], True
        case "reduce_scatter":
            total = [_reduced(call, column)]
            return parts[RANK], empty(total), [*parts[RANK], *total], True
        case "reduce_scatter_tensor":
            total, given = [_reduced(call, column)], torch.cat(parts[RANK])
            return [given], empty(total), [given, *total], False
        case "scatter":
            given = parts[RANK] if is_root else []
            wanted = [parts[call.root][RANK]]
            return given, empty(wanted), [*given, *wanted], True
        case "all_to_all":
            return parts[RANK], empty(column), [*parts[RANK], *column], True
        case "all_to_all_single":
            given, wanted = torch.cat(parts[RANK]), [torch.cat(column)]
            return [given], empty(wanted), [given, *wanted], False
    raise ValueError(call.operation)


def _made_call(
    call: Call,
    inputs: list[Tensor],
    outputs: list[Tensor],
    parts: list[list[Tensor]],
    async_op: bool,
) -> nc.Handle | None:
    function: Any = getattr(nc, call.operation)
    function = functools.partial(function, async_op=async_op)
    match call.operation:
        case "all_reduce":
            return function(*inputs, call.op)
        case "reduce":
            return function(*inputs, call.root, call.op)
        case "broadcast":
            return function(*inputs, call.root)
        case "all_gather" | "all_to_all":
            given = inputs if call.operation == "all_to_all" else inputs[0]
            return function(outputs, given)
        case "gather":
            return function(*inputs, outputs or None, call.root)
        case "reduce_scatter":
            return function(*outputs, inputs, call.op)
        case "reduce_scatter_tensor":
            return function(*outputs, *inputs, call.op)
        case "scatter":
            return function(*outputs, inputs or None, call.root)
        case "all_to_all_single":
            received = [len(row[RANK]) for row in parts]
            return function(*outputs, *inputs, received, list(map(len, parts[RANK])))
    return function(*outputs, *inputs)  # all_gather_into_tensor


def _failing(function: Callable[..., Any], step: int, call: Call) -> Callable[..., Any]:
    """The function, which raises before its call number `step`."""
    count = 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count >= step:
            raise Injected(call.operation)
        result = function(*arguments, **named)
        torch.cuda._sleep(10 * TICKS_OF_A_MS)  # what follows is late at the failure
        return result

    return called


class _Failing:
    """An object whose methods count as one function of `_failing`."""

    def __init__(self, of: Any, step: int, call: Call) -> None:
        self._of = of
        self._run = _failing(
            lambda name, *args, **named: getattr(of, name)(*args, **named), step, call
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._run, name)


def _compare(call: Call, got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        exact = call.op != "mean"
        tolerance = 0.0 if exact else 4 * torch.finfo(call.dtype).eps
        torch.testing.assert_close(
            one.cpu(), other.to(one.dtype), rtol=tolerance, atol=0.0, equal_nan=True,
            msg=lambda text, n=number: f"{call}, tensor {n}: {text}",
        )  # fmt: skip
