"""Sending fewer bytes: tensors are rounded to 16 bits for their way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Compression", "Compressor"]


class Compressor:
    """What is done to a tensor before and after it is reduced. This one does nothing.

    To make another, override both; whatever `compress` returns second is given to
    `decompress`.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What is to be sent, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The received tensor as it was before `compress`."""
        return tensor


class FP16Compressor(Compressor):
    """Floating tensors travel as float16: 5 bits of exponent, 11 of mantissa."""

    dtype = torch.float16

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        if not tensor.dtype.is_floating_point:
            return tensor, tensor.dtype
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Floating tensors travel as bfloat16: float32's range, 8 bits of mantissa."""

    dtype = torch.bfloat16


class Compression:
    """The compressors there are."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
