"""The compiled part is installed, and computes the same results as torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nbdist.collectives.reduction import reduce_rows
from nbdist.collectives.transports.native import find_compiled
from nbdist.ipc import flight_record

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import setup; setup()"
FUZZ = Path(__file__).with_name("fuzz_native.py")
AT_ONCE_BYTES = 1024
SLOT_BYTES = 4096
"""Bytes of a rank's slot, so few that tensors of 1000 elements have many blocks."""
FINGERPRINT = 12345
TEXT = flight_record.call_text("all_reduce", "sum", None, "float32", "cpu", (4,))


@pytest.fixture(scope="module")
def native() -> ModuleType:
    """The compiled module, which is installed if there is a compiler."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    found = find_compiled()
    assert found is not None, "nbdist was installed without it: pip install -e ."
    return found


def kernels() -> list[tuple[str, torch.dtype]]:
    """The ops and dtypes of the compiled kernels."""
    found = find_compiled()
    names = [] if found is None else [name.split() for name in found.KERNELS]
    return [(op, getattr(torch, dtype)) for op, dtype in names]


def barriers(native: ModuleType, size: int) -> list[Any]:
    """A barrier for each rank, all in this process. None waits for a late rank."""
    head = 64 * (1 + 2 * size + size * size)
    bytes_needed = head + 2 * (size + 1) * SLOT_BYTES * size
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, bytes_needed)
    layout = {"slots_at": head, "slot_bytes": SLOT_BYTES * size}
    waits = {"spins": 0, "yields": 0, "nap_s": 0.0}
    made = [
        native.Barrier(descriptor, rank, size, **layout, **waits)
        for rank in range(size)
    ]
    os.close(descriptor)
    return made


def call_log(native: ModuleType) -> Any:
    """The log of a group of one rank."""
    descriptor = flight_record.open_unnamed()
    recorder = native.Recorder(descriptor, flight_record.CALLS)
    os.close(descriptor)
    return native.CallLog(recorder, 0, 0, 0, b"0")


def reductions(
    native: ModuleType, op: str, dtype: torch.dtype, size: int, length: int, **how: Any
) -> list[Any]:
    """A reduction for each rank."""
    kernel = native.KERNELS.index(f"{op} {str(dtype).removeprefix('torch.')}")
    operation = how.get("operation", native.ALL_REDUCE)
    root = how.get("root", 0)
    return [
        native.Reduction(barrier, operation, kernel, length, AT_ONCE_BYTES, root)
        for barrier in barriers(native, size)
    ]


def complete_calls(
    reductions: list[Any], begin: Callable[[int], bool | None]
) -> list[bool]:
    """Start a call on each rank, and resume the calls in turn until all have ended."""
    outcomes = [begin(rank) for rank in range(len(reductions))]
    for _ in range(1000):
        if None not in outcomes:
            return [bool(each) for each in outcomes]
        for rank, reduction in enumerate(reductions):
            if outcomes[rank] is None:
                outcomes[rank] = reduction.resume()
    raise AssertionError(f"not done: {outcomes}")


def drawn(seed: int, dtype: torch.dtype, count: int, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        low, high = limits.min, limits.max
        made = torch.randint(low, high, (count, length), generator=generator)
        return list(made.to(dtype))
    made = torch.randn((count, length), generator=generator, dtype=dtype)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, 0.0], dtype=dtype)
    where = torch.randint(0, 40, (count, length), generator=generator)
    return list(torch.where(where < 5, special[where.clamp(max=4)], made))


SIZES = st.integers(1, 9)
LENGTHS = st.sampled_from([0, 1, 2, 7, 255, 256, 257, 1023, 2049, 5000])


@pytest.mark.parametrize(("op", "dtype"), kernels())
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), size=SIZES, length=LENGTHS)
def test_the_same_bits_as_torch_on_all_ranks(
    native: ModuleType, op: str, dtype: torch.dtype, seed: int, size: int, length: int
) -> None:
    rows = drawn(seed, dtype, size, length)
    expected = reference(op, rows)
    ranks = reductions(native, op, dtype, size, length)
    for _ in range(3):  # at even and at odd steps
        tensors = [row.clone() for row in rows]
        done = complete_calls(ranks, lambda r: ranks[r].run(tensors[r], FINGERPRINT))  # noqa: B023
        assert done == [True] * size
        for tensor in tensors:
            assert_same(tensor, expected)


def reference(op: str, rows: list[Tensor]) -> Tensor:
    if len(rows) == 1:
        return rows[0]
    expected = torch.empty_like(rows[0])
    reduce_rows(op, rows, expected)
    return expected


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), size=SIZES, length=LENGTHS, data=st.data())
def test_reduce_changes_only_the_tensor_of_the_root(
    native: ModuleType, seed: int, size: int, length: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, size - 1))
    rows = drawn(seed, torch.float32, size, length)
    how = {"operation": native.REDUCE, "root": root}
    ranks = reductions(native, "sum", torch.float32, size, length, **how)
    tensors = [row.clone() for row in rows]
    complete_calls(ranks, lambda r: ranks[r].run(tensors[r], FINGERPRINT))
    for rank, tensor in enumerate(tensors):
        assert_same(tensor, reference("sum", rows) if rank == root else rows[rank])


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), size=SIZES, length=LENGTHS, inplace=st.booleans())
def test_reduce_scatter_gives_each_rank_its_part(
    native: ModuleType, seed: int, size: int, length: int, inplace: bool
) -> None:
    inputs = [drawn(seed + rank, torch.int64, size, length) for rank in range(size)]
    expected = [reference("sum", [each[r] for each in inputs]) for r in range(size)]
    how = {"operation": native.REDUCE_SCATTER}
    ranks = reductions(native, "sum", torch.int64, size, length, **how)
    outputs = [
        inputs[rank][rank] if inplace else torch.empty(length, dtype=torch.int64)
        for rank in range(size)
    ]
    complete_calls(
        ranks, lambda r: ranks[r].run_lists(outputs[r], inputs[r], FINGERPRINT)
    )
    for output, part in zip(outputs, expected, strict=True):
        assert_same(output, part)


@pytest.mark.parametrize("length", [3, 5000])
def test_a_different_fingerprint_is_noticed_before_data_is_changed(
    native: ModuleType, length: int
) -> None:
    ranks = reductions(native, "sum", torch.float32, 3, length)
    tensors = [torch.full((length,), float(rank)) for rank in range(3)]
    done = complete_calls(ranks, lambda r: ranks[r].run(tensors[r], r // 2))
    assert done == [False] * 3
    for rank, tensor in enumerate(tensors):
        assert (tensor == rank).all()
    done = complete_calls(ranks, lambda r: ranks[r].run(tensors[r], FINGERPRINT))
    assert done == [True] * 3
    assert all((tensor == 3).all() for tensor in tensors)


def others() -> Iterator[tuple[str, Callable[[], object]]]:
    """Objects that are not dense float32 tensors of 4 elements in host memory."""

    class Subclass(Tensor):
        pass

    def freed() -> Tensor:
        tensor = torch.ones(4)
        tensor.untyped_storage().resize_(0)
        return tensor

    yield "none", lambda: None
    yield "a number", lambda: 8
    yield "a list", lambda: [1.0] * 4
    yield "an array", lambda: torch.ones(4).numpy()
    yield "another dtype", lambda: torch.ones(4, dtype=torch.int32)
    yield "another length", lambda: torch.ones(5)
    yield "on no device", lambda: torch.ones(4, device="meta")
    yield "strided", lambda: torch.ones(8)[::2]
    yield "expanded", lambda: torch.ones(1).expand(4)
    yield "negated", lambda: torch.ones(4, dtype=torch.complex64).conj().imag
    yield "sparse", lambda: torch.ones(4).to_sparse()
    yield "sparse rows", lambda: torch.ones(2, 2).to_sparse_csr()
    yield "opaque", lambda: torch.ones(4).to_mkldnn()
    yield (
        "quantized",
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    )
    yield "a subclass", lambda: torch.ones(4).as_subclass(Subclass)
    yield "freed", freed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("what", "make"), list(others()))
def test_other_tensors_start_no_call(
    native: ModuleType, what: str, make: Callable[[], object]
) -> None:
    (reduction,) = reductions(native, "sum", torch.float32, 1, 4)
    tensor = torch.ones(4)
    assert reduction.run(make(), FINGERPRINT) is NotImplemented
    how = {"operation": native.REDUCE_SCATTER}
    (scatter,) = reductions(native, "sum", torch.float32, 1, 4, **how)
    assert scatter.run_lists(make(), [tensor], FINGERPRINT) is NotImplemented
    assert scatter.run_lists(tensor, [make()], FINGERPRINT) is NotImplemented
    assert reduction.run(tensor, FINGERPRINT) is True
    assert scatter.run_lists(tensor, [tensor], FINGERPRINT) is True


def test_parameters_and_tensors_of_any_shape_are_accepted(native: ModuleType) -> None:
    ranks = reductions(native, "sum", torch.float32, 2, 4)
    tensors = [torch.nn.Parameter(torch.ones(2, 2)), torch.ones(4, 1)]
    complete_calls(ranks, lambda r: ranks[r].run(tensors[r], FINGERPRINT))
    assert all((tensor == 2).all() for tensor in tensors)


def test_a_quick_call_starts_only_if_no_call_is_held(native: ModuleType) -> None:
    (barrier,) = barriers(native, 1)
    log = call_log(native)
    quick = native.QuickCalls(barrier, log)
    kernel = native.KERNELS.index("sum float32")
    made = native.Reduction(barrier, native.ALL_REDUCE, kernel, 4, AT_ONCE_BYTES, 0)
    tensor = torch.ones(2, 2)
    assert quick.all_reduce(tensor, "sum") is False  # it is not known yet
    quick.keep("sum", tensor.shape, made, FINGERPRINT, TEXT)
    assert quick.all_reduce(tensor, "sum") is True
    assert quick.all_reduce(tensor.view(4), "sum") is False
    assert quick.all_reduce(tensor, "max") is False
    assert quick.all_reduce(tensor.T, "sum") is False
    assert quick.hold() is True
    assert quick.all_reduce(tensor, "sum") is False
    quick.release()
    assert quick.all_reduce(tensor, "sum") is True
    assert log.sequence == 2
    barrier.stopped = True
    assert quick.all_reduce(tensor, "sum") is False


def test_a_quick_call_that_waits_for_a_rank_is_resumed(native: ModuleType) -> None:
    made = reductions(native, "sum", torch.float32, 2, 4)
    log = call_log(native)
    quick = [native.QuickCalls(barrier, log) for barrier in barriers(native, 2)]
    with pytest.raises(ValueError, match="other tensors"):
        quick[0].keep("sum", (4,), made[0], FINGERPRINT, TEXT)  # another group's
    quick = []
    kernel = native.KERNELS.index("sum float32")
    for barrier in barriers(native, 2):
        reduction = native.Reduction(barrier, native.ALL_REDUCE, kernel, 4, 1024, 0)
        quick.append(native.QuickCalls(barrier, log))
        quick[-1].keep("sum", (4,), reduction, FINGERPRINT, TEXT)
    tensors = [torch.ones(4), torch.ones(4)]
    assert quick[0].all_reduce(tensors[0], "sum") is None
    assert quick[0].waiting is not None
    assert quick[0].hold() is False
    assert quick[0].all_reduce(tensors[0], "sum") is False
    assert quick[0].resume() is None
    assert quick[1].all_reduce(tensors[1], "sum") is True
    assert quick[0].resume() is True
    assert quick[0].waiting is None
    quick[0].release()
    assert all((tensor == 2).all() for tensor in tensors)


def test_invalid_arguments_are_refused(native: ModuleType) -> None:
    (barrier,) = barriers(native, 1)
    descriptor = os.memfd_create("test")
    with pytest.raises(ValueError, match="expected a file of"):
        native.Barrier(descriptor, 0, 1, 256, 4096, 0, 0, 0.0)
    os.close(descriptor)
    with pytest.raises(ValueError, match="at most 64"):
        native.Barrier(descriptor, 1, 1, 256, 4096, 0, 0, 0.0)
    with pytest.raises(ValueError, match="overlap"):
        native.Barrier(descriptor, 0, 1, 64, 4096, 0, 0, 0.0)
    with pytest.raises(TypeError, match="expected a Barrier"):
        native.Reduction(object(), 0, 0, 4, 0, 0)
    with pytest.raises(TypeError, match="expected a Barrier"):
        native.Reduction(native.Barrier.__new__(native.Barrier), 0, 0, 4, 0, 0)
    for wrong in [(0, 99, 4, 0, 0), (9, 0, 4, 0, 0), (0, 0, -1, 0, 0), (1, 0, 4, 0, 1)]:
        with pytest.raises(ValueError, match="unknown"):
            native.Reduction(barrier, *wrong)
    with pytest.raises(RuntimeError, match="another operation"):
        native.Reduction(barrier, native.ALL_REDUCE, 0, 4, 0, 0).run_lists(1, 2, 3)


def test_no_call_from_python_crashes_the_process() -> None:
    """100,000 calls of functions of the compiled part, with random arguments."""
    answer = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(FUZZ), "100000", "4711"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-4000:]
    calls = int(answer.stdout.split()[0])
    assert calls > 100  # enough to reduce something


def test_without_a_compiler_the_build_succeeds(tmp_path: Path) -> None:
    """`pip install` runs this build. The package then runs its Python code."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    sources = tmp_path / "nbdist" / "collectives"
    sources.mkdir(parents=True)
    shutil.copy(ROOT / "nbdist/collectives/_native.c", sources)
    build = [sys.executable, "-c", BUILD, "build_ext", "--inplace"]
    subprocess.run(
        build,
        cwd=tmp_path,
        env={"CC": "/nonexistent", "PATH": ""},
        check=True,
        capture_output=True,
        timeout=100,
    )
    assert not list(sources.glob("*.so"))


def test_no_format_of_an_argument_depends_on_the_python_that_compiles():
    """A module that Python 3.13 compiles runs in Python 3.10.

    "#" means another function then. `PY_SSIZE_T_CLEAN` has chosen it before 3.13 only.
    """
    for source in (ROOT / "nbdist").rglob("*.c"):
        text = source.read_text(encoding="utf-8")
        calls = re.findall(r"Py(?:Arg_Parse|_BuildValue)\w*\([^;]*;", text)
        assert not [call for call in calls if "#" in call], source.name
