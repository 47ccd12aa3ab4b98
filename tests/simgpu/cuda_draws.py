"""Draws of collectives of CUDA tensors: a pure function of a seed.

A draw is a few calls of one group, of which the last may fail. `drawn_calls.py` makes
the calls on ranks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

__all__ = ["GPUS", "OPERATIONS", "RANKS", "STREAMS", "Call", "Draw", "draw"]

RANKS, GPUS = 3, 4
STREAMS = 3
"""The default stream and two others."""
PARTED = (
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "all_to_all",
    "all_to_all_single",
)  # fmt: skip
"""Operations with a tensor for each pair of ranks, for which a slot is divided."""
OPERATIONS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "gather", *PARTED,
)  # fmt: skip
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool)
FAILURES = (
    "one raises before the call",
    "one fails in the middle",
    "one leaves it out",
)


@dataclass(frozen=True)
class Call:
    """One call. A tuple has an item for each rank."""

    operation: str
    op: str
    """The reduce-op; "" for an operation without one."""
    dtype: torch.dtype
    length: int
    """Elements of each tensor; of `all_to_all`, of the longest."""
    root: int
    odd: str
    """"nan", "inf" or "-inf", which the inputs of one rank have; else ""."""
    odd_rank: int
    """A rank that is not the root."""
    is_async: bool
    made_on: tuple[int, ...]
    """The stream that computes the rank's inputs."""
    called_on: tuple[int, ...]
    """The stream that is current at the call."""
    read_on: tuple[int, ...]
    """The stream that reads the results, and then overwrites inputs and results."""
    late_ms: tuple[int, ...]
    """How long the inputs take to compute."""
    elsewhere: tuple[bool, ...]
    """Whether the current device is not that of the tensors."""
    strided: tuple[bool, ...]
    """Whether the tensors are not contiguous, where the operation allows it."""


@dataclass(frozen=True)
class Draw:
    """Calls of one group."""

    seed: int
    transport: str
    gpus: tuple[int, ...]
    """The GPU of each rank."""
    slot_bytes: int
    """Bytes of a slot, or of a piece that is staged; 0 to derive it from `memory`."""
    memory: tuple[float, ...]
    """The fraction of its GPU's memory that each rank may use."""
    calls: tuple[Call, ...]
    failure: str
    """One of FAILURES, for the last call; else ""."""
    failing: int
    """The rank that fails."""
    step: int
    """The step of the transport before which it fails, if in the middle."""

    def __str__(self) -> str:
        calls = "; ".join(map(_text, self.calls))
        end = f"; rank {self.failing}: {self.failure}" if self.failure else ""
        slots = f"slots of {self.slot_bytes or self.memory}"
        return f"{self.seed}: {self.transport} on {self.gpus}, {slots}: {calls}{end}"


def _text(call: Call) -> str:
    what = " ".join(filter(None, [call.operation, call.op, call.odd]))
    how = "async" if call.is_async else "sync"
    streams = f"streams {call.made_on} {call.called_on} {call.read_on}"
    return (
        f"{what} of {call.length} {str(call.dtype)[6:]}, root {call.root}, {how}, "
        f"{streams}, elsewhere {call.elsewhere}, strided {call.strided}"
    )


def draw(seed: int) -> Draw:
    """The draw of a seed."""
    chance = random.Random(seed)
    transport = chance.choice(["ipc", "ipc", "staged", "nccl"])
    slot_bytes = chance.choice([12288, 12288, 24576, 98304])
    memory = (1.0,) * RANKS
    if transport == "ipc" and chance.random() < 0.3:
        slot_bytes, memory = 0, tuple(chance.choice([0.25, 0.5, 1.0]) for _ in memory)
    room = slot_bytes or 12288
    calls = tuple(_call(chance, room) for _ in range(chance.choice([1, 2, 4])))
    failure = chance.choice(FAILURES) if chance.random() < 0.3 else ""
    if failure == "one fails in the middle":  # which a long call has
        *others, last = calls
        long = replace(last, length=4 * _slot(room, last.operation, last.dtype))
        calls = (*others, long)
    return Draw(
        seed=seed,
        transport=transport,
        gpus=_gpus(chance, transport),
        slot_bytes=slot_bytes,
        memory=memory,
        calls=calls,
        failure=failure,
        failing=chance.randrange(RANKS),
        step=chance.choice([1, 2]),
    )


def _gpus(chance: random.Random, transport: str) -> tuple[int, ...]:
    own = chance.sample(range(GPUS), RANKS)
    how = "own" if transport == "nccl" else chance.choice(["one", "one", "two", "own"])
    return {"one": (own[0],) * RANKS, "two": (own[0], own[1], own[0]), "own": (*own,)}[
        how
    ]


def _call(chance: random.Random, slot_bytes: int) -> Call:
    def for_each(choices: list[int]) -> tuple[int, ...]:
        return tuple(chance.choice(choices) for _ in range(RANKS))

    def likely(share: float) -> tuple[bool, ...]:
        return tuple(chance.random() < share for _ in range(RANKS))

    operation = chance.choice(OPERATIONS)
    dtype = chance.choice([*DTYPES, *FLOATS])
    op = chance.choice(_ops(dtype)) if operation in REDUCTIONS else ""
    root = chance.randrange(RANKS)
    has_odd = dtype.is_floating_point and chance.random() < 0.5
    streams = list(range(STREAMS))
    made_on = for_each(streams)
    called_on = made_on if chance.random() < 0.5 else for_each(streams)
    slot = _slot(slot_bytes, operation, dtype)
    return Call(
        operation=operation,
        op=op,
        dtype=dtype,
        length=chance.choice([0, 1, slot - 1, slot, slot + 1, 2 * slot + 7, 4 * slot]),
        root=root,
        odd=chance.choice(["nan", "inf", "-inf"]) if has_odd else "",
        odd_rank=(root + chance.choice([1, 2])) % RANKS,
        is_async=chance.random() < 0.5,
        made_on=made_on,
        called_on=called_on,
        read_on=called_on if chance.random() < 0.3 else for_each(streams),
        late_ms=for_each([0, 1, 4]),
        elsewhere=likely(0.3),
        strided=likely(0.3),
    )


def _slot(slot_bytes: int, operation: str, dtype: torch.dtype) -> int:
    """The elements that a slot has for each tensor."""
    return slot_bytes // (RANKS if operation in PARTED else 1) // dtype.itemsize


def _ops(dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        return ["sum", "mean", "product"]
    if dtype.is_floating_point:
        return ["sum", "mean", "product", "min", "max", "min", "max"]
    return ["sum", "product", "min", "max", "band", "bor", "bxor"]
