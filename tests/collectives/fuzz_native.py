"""Calls every function of the compiled part with random arguments.

    python fuzz_native.py CALLS SEED

Prints how many calls returned. Ends with an exception that a call must not raise, or by
the signal of a crash.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from nbdist.collectives import _native as native  # type: ignore[attr-defined]

ALLOWED = (TypeError, ValueError, RuntimeError, OverflowError, OSError, AttributeError)
NAMES = [*native.KERNELS, "sum", "max", "float32", "", "\0"]


class Subclass(torch.Tensor):
    pass


class Liar(torch.Tensor):
    """Has the methods of a tensor, and the address 8."""

    dtype = torch.float32
    nbytes = 16
    is_cpu = True
    shape = torch.Size((4,))

    def data_ptr(self) -> int:
        return 8

    def is_contiguous(self, *_: Any) -> bool:
        return True


def memory(size: int) -> int:
    descriptor = os.memfd_create("fuzz")
    os.ftruncate(descriptor, size)
    return descriptor


DESCRIPTORS = [memory(0), memory(4096), memory(2**20)]


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


def parameter() -> torch.Tensor:
    return torch.nn.UninitializedParameter()


MAKERS: list[Callable[[random.Random], object]] = [
    lambda r: torch.ones(r.choice([0, 1, 4, 5, 300, 9000])),
    lambda r: torch.ones(4),
    lambda r: torch.ones(2, 2),
    lambda r: torch.ones(4, dtype=r.choice([torch.int32, torch.int64, torch.bool])),
    lambda r: torch.ones(4, device="meta"),
    lambda r: torch.ones(8)[::2],
    lambda r: torch.ones(4, dtype=torch.complex64).conj().imag,
    lambda r: torch.ones(4).to_sparse(),
    lambda r: torch.ones(2, 2).to_sparse_csr(),
    lambda r: torch.ones(4).to_mkldnn(),
    lambda r: torch.ones(4).as_subclass(Subclass),
    lambda r: torch.ones(4).as_subclass(Liar),
    lambda r: torch.nn.Parameter(torch.ones(4)),
    lambda r: parameter(),
    lambda r: freed(),
    lambda r: fake(),
    lambda r: r.choice([0, 1, 2, 3, 4, 8, 64, 65, 256, 4096, 12288, 2**16]),
    lambda r: r.choice([-1, 2**31, 2**62, 2**63, 2**64, -(2**63), 2**200]),
    lambda r: r.choice(DESCRIPTORS),
    lambda r: r.choice(
        [None, True, 0.0, 0.01, -1.0, float("nan"), float("inf"), 1e300]
    ),
    lambda r: r.choice(NAMES),
    lambda r: torch.Size((r.choice([0, 1, 4, -1, 2**62]),)),
    lambda r: r.choice([(), (4,), (2, 2), (2**40, 2**40), ("4",), (-1,)]),
    lambda r: [torch.ones(4) for _ in range(r.randrange(4))],
    lambda r: (fake(), freed()),
    lambda r: object(),
    lambda r: [],
    lambda r: {},
    lambda r: native.Barrier.__new__(native.Barrier),
    lambda r: native.Reduction.__new__(native.Reduction),
    lambda r: native.QuickCalls.__new__(native.QuickCalls),
    lambda r: native.Recorder.__new__(native.Recorder),
    lambda r: native.CallLog.__new__(native.CallLog),
    lambda r: r.choice([b"", b"0-3", b"\tall_reduce", b"x" * 1000]),
]
METHODS = {
    "Barrier": ["arrive", "resume", "__init__"],
    "Reduction": ["run", "run_lists", "resume", "__init__"],
    "QuickCalls": ["keep", "all_reduce", "resume", "hold", "release", "__init__"],
    "Recorder": ["__init__"],
    "CallLog": [
        "begin",
        "schedule",
        "message",
        "start",
        "locate",
        "end",
        "__init__",
    ],
}


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.made: list[Any] = []
        self.returned = 0

    def draw(self) -> object:
        if self.made and self.random.random() < 0.25:
            return self.random.choice(self.made)
        return self.random.choice(MAKERS)(self.random)

    def step(self) -> None:
        before = self.returned
        try:
            self.call()
        except ALLOWED:
            self.returned = before

    def call(self) -> None:
        chance = self.random.random()
        self.returned += 1
        if chance < 0.1 or not self.made:
            self.keep(self.sensible())
        elif chance < 0.2:
            kind = self.random.choice(
                [native.Barrier, native.Reduction, native.Recorder]
            )
            self.keep(kind(*(self.draw() for _ in range(self.random.randrange(9)))))
        elif chance < 0.25:
            self.random.choice(self.made).stopped = self.draw()
        else:
            target = self.random.choice(self.made)
            name = self.random.choice(METHODS[type(target).__name__])
            arity = self.random.choice([0, 1, 2, 2, 3, 3, 4])
            getattr(target, name)(*(self.draw() for _ in range(arity)))

    def sensible(self) -> object:
        """A valid Barrier, Reduction, QuickCalls or CallLog."""
        alone = [each for each in self.made if type(each) is native.Barrier]
        kind = self.random.randrange(5)
        if kind == 4:
            return self.log()
        if kind == 0 or not alone:
            size = self.random.choice([1, 1, 1, 2])
            place = self.random.randrange(size), size, 4096, 4096 * size
            return native.Barrier(DESCRIPTORS[2], *place, 0, 1, 0.0)
        barrier = self.random.choice(alone)
        if kind == 1:
            quick = native.QuickCalls(barrier, self.log())
            made = native.Reduction(barrier, native.ALL_REDUCE, 0, 4, 1024, 0)
            quick.keep("sum", (4,), made, 1, b"\tall_reduce")
            return quick
        length = self.random.choice([0, 4, 4, 300, 9000])
        kernel = self.random.choice([0, 0, self.random.randrange(len(native.KERNELS))])
        return native.Reduction(
            barrier, self.random.randrange(3), kernel, length, 1024, 0
        )

    def log(self) -> object:
        """A log of few calls, so that they overwrite each other."""
        recorder = native.Recorder(DESCRIPTORS[2], 3)
        self.keep(recorder)
        return native.CallLog(recorder, 0, 0, 0, b"0-3")

    def keep(self, made: object) -> None:
        self.made.append(made)
        if len(self.made) > 40:
            del self.made[self.random.randrange(len(self.made))]


def main(calls: int, seed: int) -> None:
    warnings.simplefilter("ignore")
    fuzzer = Fuzzer(seed)
    for _ in range(calls):
        fuzzer.step()
    print(fuzzer.returned, "calls returned")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
