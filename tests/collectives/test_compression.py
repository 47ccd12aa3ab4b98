"""The formats in which values are sent between hosts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nbdist.collectives.compression import CODECS, BlockInt8, codec_of
from nbdist.errors import UsageError

LENGTHS = [0, 1, 2, 255, 256, 257, 1000, 4096, 70_001]


def through(name: str, values: Tensor) -> Tensor:
    codec = codec_of(name)
    encoded = torch.full((codec.size(len(values)),), 0xA5, dtype=torch.uint8)
    codec.encode(values, encoded)
    decoded = torch.full_like(values, 7.0)
    codec.decode(encoded, decoded)
    return decoded


def blocks(values: Tensor) -> list[Tensor]:
    return list(values.split(BlockInt8.BLOCK)) if len(values) else []


@pytest.mark.parametrize("length", LENGTHS)
def test_an_int8_is_off_by_at_most_half_a_step_of_its_block(length: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(length))
    for exact, found in zip(
        blocks(values), blocks(through("int8", values)), strict=True
    ):
        step = exact.abs().max() / 127
        assert (exact - found).abs().max() <= step * 0.5001


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=300)
)
@settings(deadline=None)
def test_any_finite_values_stay_finite(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    tensor = tensor.clamp(-1e38, 1e38)
    for name in CODECS:
        assert through(name, tensor).isfinite().all()


@pytest.mark.parametrize("length", LENGTHS)
def test_bf16_is_torchs(length: int) -> None:
    values = torch.randn(length)
    assert torch.equal(through("bf16", values), values.bfloat16().float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_a_value_that_is_not_finite_is_nan(bad: float) -> None:
    values = torch.ones(600)
    values[300] = bad
    found = through("int8", values)
    assert found[256:512].isnan().all()
    assert torch.allclose(found[:256], values[:256])
    assert torch.allclose(found[512:], values[512:])


def test_zeros_and_the_smallest_numbers_are_encoded() -> None:
    assert not through("int8", torch.zeros(300)).any()
    tiny = torch.full((300,), 1e-45)
    assert (through("int8", tiny) - tiny).abs().max() <= 1e-45


def test_the_bytes_of_each_format() -> None:
    assert codec_of("bf16").size(10_000) == 20_000
    assert codec_of("int8").size(25_600) / (4 * 25_600) < 0.27


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UsageError, match=r"compression 'fp4': expected one of 'bf16'"):
        codec_of("fp4")
