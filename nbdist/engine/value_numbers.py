"""Statistics of tensors and arrays, read block by block and bounded in bytes.

A value whose memory is larger than `SAMPLE_BYTES` is sampled: evenly spaced blocks are
read, and the statistics say so. An expanded tensor is read once, as it lies in memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nbdist.training.blocks import (
    Strided,
    boxes_of,
    check_device,
    octet_blocks,
    strided,
)
from nbdist.training.leaves import Deadline

__all__ = ["Numbers", "histogram_of", "norm_of", "numbers_of"]

SAMPLE_BYTES = 256 << 20
REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
"""The dtypes of complex numbers' parts."""

Content = Tensor | np.ndarray[Any, Any]


@dataclasses.dataclass
class Numbers:
    """Statistics of real numbers. Those but the counts are of finite ones."""

    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    norm: float = 0.0
    nans: int = 0
    infinities: int = 0
    finite: int = 0
    """The numbers that are finite, among those that were read."""
    is_sampled: bool = False


@torch.no_grad()
def norm_of(content: Content, deadline: Deadline) -> tuple[float, bool]:
    """The Euclidean norm, and whether it is an estimate from a sample.

    Raises:
        Unreadable: The memory cannot be read.
        TooSlow: The deadline has passed.
    """
    blocks = _Blocks(content, deadline)
    square, count = 0.0, 0
    for block in blocks:
        norm = torch.linalg.vector_norm(block, dtype=torch.float64).item()
        square += norm * norm
        count += block.numel()
    scale = blocks.total / count if count else 1.0
    return math.sqrt(square * scale), blocks.is_sampled


@torch.no_grad()
def numbers_of(content: Content, deadline: Deadline) -> Numbers:
    """The statistics of a tensor or array; of a complex one those of its parts.

    Raises:
        Unreadable, TooSlow: As `norm_of`.
    """
    blocks = _Blocks(content, deadline)
    found = Numbers(is_sampled=blocks.is_sampled)
    total = square = 0.0
    count = 0
    for block in blocks:
        count += block.numel()
        finite = block
        if block.is_floating_point() and not math.isfinite(block.sum().item()):
            found.nans += int(block.isnan().sum().item())
            found.infinities += int(block.isinf().sum().item())
            finite = block[block.isfinite()]
        if finite.numel():
            low, high = (each.item() for each in finite.aminmax())
            found.low, found.high = min(found.low, low), max(found.high, high)
            found.finite += finite.numel()
            total += finite.sum(dtype=torch.float64).item()
            norm = torch.linalg.vector_norm(finite, dtype=torch.float64).item()
            square += norm * norm
    scale = blocks.total / count if count else 1.0
    found.mean = total / found.finite if found.finite else math.nan
    found.norm = math.sqrt(square * scale)
    found.nans, found.infinities = (
        round(each * scale) for each in (found.nans, found.infinities)
    )
    return found


@torch.no_grad()
def histogram_of(
    content: Content, bins: int, low: float, high: float, deadline: Deadline
) -> list[float]:
    """How many finite numbers are in each of some equal intervals.

    Raises:
        Unreadable, TooSlow: As `norm_of`.
    """
    # Whatever the default device of the user is.
    counts = torch.zeros(bins, dtype=torch.float64, device="cpu")
    for block in _Blocks(content, deadline):
        finite = block[block.isfinite()]
        counts += torch.histc(finite, bins, low, high).double().cpu()
    listed: list[float] = counts.tolist()
    return listed


class _Blocks:
    """The numbers of a tensor or array in blocks, as float32 or float64."""

    def __init__(self, content: Content, deadline: Deadline) -> None:
        self._content, self._deadline = content, deadline
        self._is_on_host = isinstance(content, np.ndarray) or (
            content.device.type == "cpu"
        )
        if isinstance(content, np.ndarray) or self._is_on_host:
            where = strided(content)
        else:
            check_device(content.device)
            width = content.element_size()
            strides = tuple(width * each for each in content.stride())
            where = Strided(0, width, tuple(content.shape), strides, False)
        self._where, times = where.distinct()
        parts = 2 if isinstance(content, Tensor) and content.is_complex() else 1
        if isinstance(content, np.ndarray) and content.dtype.kind == "c":
            parts = 2
        width = max(where.width, 1)
        self.total = self._where.size // width * times * parts
        """The numbers of the whole content."""
        self.is_sampled = self._where.size > SAMPLE_BYTES

    def __iter__(self) -> Iterator[Tensor]:
        for block in self._read():
            self._deadline.check()
            yield block

    def _read(self) -> Iterator[Tensor]:
        content = self._content
        if isinstance(content, np.ndarray):
            for octets in octet_blocks(self._where, SAMPLE_BYTES):
                yield torch.from_numpy(_real(octets.view(content.dtype)))
        elif self._is_on_host:
            dtype = REAL.get(content.dtype, content.dtype)
            for octets in octet_blocks(self._where, SAMPLE_BYTES):
                yield _wide(torch.from_numpy(octets).view(dtype), content.is_neg())
        else:
            yield from self._on_device(content)

    def _on_device(self, content: Tensor) -> Iterator[Tensor]:
        where, plain = self._where, content.detach()
        width = where.width
        strides = [each // width for each in where.strides]
        step = -(-where.size // SAMPLE_BYTES) or 1
        for index, (offset, shape) in enumerate(boxes_of(where)):
            if index % step == 0 and where.size:
                place = plain.storage_offset() + offset // width
                block = plain.as_strided(shape, strides, place).resolve_conj()
                if block.is_complex():
                    block = torch.view_as_real(block)
                yield _wide(block.reshape(-1), is_negative=False)


def _wide(block: Tensor, is_negative: bool) -> Tensor:
    """Numbers with which torch computes everywhere."""
    if not block.is_floating_point():
        block = block.double()
    elif block.element_size() < 4:
        block = block.float()
    return -block if is_negative else block


def _real(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if block.dtype.kind == "c":
        block = block.view(block.real.dtype)
    is_known = block.dtype in (np.float32, np.float64) and block.dtype.isnative
    return block if is_known else block.astype(np.float64)
