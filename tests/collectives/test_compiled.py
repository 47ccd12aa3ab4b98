"""The compiled part: that it is there, and that it computes what torch computes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nbdist.collectives._crossing import find_compiled
from nbdist.collectives._reduction import reduce_rows

ROOT = Path(__file__).parents[2]
CHUNK_BYTES = 8192
BUILD = "from setuptools import setup; setup()"


@pytest.fixture(scope="module")
def native() -> ModuleType:
    """Installed with the package, where there is a compiler."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    found = find_compiled()
    assert found is not None, "nbdist was installed without it: pip install -e ."
    return found


def kernels() -> list[tuple[str, torch.dtype]]:
    """Each op and dtype that was compiled."""
    found = find_compiled()
    names = [] if found is None else [name.split() for name in found.KERNELS]
    return [(op, getattr(torch, dtype)) for op, dtype in names]


def compiled(
    native: ModuleType, op: str, rows: list[Tensor], outs: list[Tensor]
) -> None:
    kernel = native.KERNELS.index(f"{op} {str(rows[0].dtype).removeprefix('torch.')}")
    addresses = [tuple(each.data_ptr() for each in some) for some in (outs, rows)]
    native.reduce(kernel, *addresses, len(rows[0]))


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


@pytest.mark.parametrize(("op", "dtype"), kernels())
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(2, 9),
    length=st.sampled_from([0, 1, 2, 7, 1023, 1024, 2048, 2049, 5000]),
)
def test_the_same_bits_as_torch(
    native: ModuleType, op: str, dtype: torch.dtype, seed: int, count: int, length: int
) -> None:
    rows = drawn(seed, dtype, count, length)
    expected = torch.empty_like(rows[0])
    reduce_rows(op, rows, expected)
    outs = [torch.empty_like(expected), torch.empty_like(expected)]
    compiled(native, op, rows, outs)
    for out in outs:
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("own", [0, 1, 3])
def test_the_result_may_take_the_place_of_an_operand(
    native: ModuleType, own: int
) -> None:
    rows = drawn(3, torch.float32, 4, CHUNK_BYTES)
    expected = torch.empty_like(rows[0])
    reduce_rows("sum", rows, expected)
    compiled(native, "sum", rows, [rows[own]])
    torch.testing.assert_close(rows[own], expected, rtol=0, atol=0, equal_nan=True)


def test_wrong_arguments_are_refused(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="no such kernel"):
        native.reduce(len(native.KERNELS), (), (1,), 0)
    with pytest.raises(ValueError, match="no rows"):
        native.reduce(0, (), (), 0)
    with pytest.raises(ValueError, match="65 addresses"):
        native.reduce(0, (), (1,) * 65, 0)
    with pytest.raises(TypeError, match="copy"):
        native.copy(1)
    with pytest.raises(ValueError, match="expected 1 addresses"):
        native.Crossing((8,), (), (8,) * 4, 8, 0, 0, 0.0)
    with pytest.raises(ValueError, match="address is 0"):
        native.Crossing((0,), (8,), (8,) * 4, 8, 0, 0, 0.0)


def test_without_a_compiler_the_build_goes_on(tmp_path: Path) -> None:
    """What `pip install` runs; the package is then the one in Python."""
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
