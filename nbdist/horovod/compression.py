"""Compression: tensors are rounded to 16 bits before they are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Compression", "Compressor", "compressed"]


class Compressor:
    """Changes a tensor before and after its reduction. The base class changes nothing.

    A subclass overrides both methods. The second value of `compress` is the second
    argument of `decompress`.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and a context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the reduced tensor with the dtype that it had before `compress`."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating tensors as float16: 5 bits of exponent, 11 of mantissa."""

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
    """Sends floating tensors as bfloat16: the range of float32, 8 bits of mantissa."""

    dtype = torch.bfloat16


def compressed(
    compression: type[Compressor],
    tensors: Sequence[Tensor],
    reduce: Callable[..., Sequence[Tensor]],
) -> list[Tensor]:
    """Compress tensors, reduce them, and decompress the results.

    Args:
        compression: Compresses each tensor.
        tensors: The tensors, which are not changed.
        reduce: Takes the compressed tensors as its arguments, and returns a result for
            each of them.
    """
    packed = [compression.compress(tensor) for tensor in tensors]
    reduced = reduce(*(tensor for tensor, _ in packed))
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, packed, strict=True)
    ]


class Compression:
    """The compressors of this package."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
