"""Formats in which float32 values are sent between hosts with fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from nbdist.errors import UsageError

__all__ = ["CODECS", "Codec", "codec_of"]


class Codec(ABC):
    """Encodes float32 values. All ranks decode the same bytes to the same bits.

    The tensors are contiguous, one-dimensional, in host memory.
    """

    has_feedback: ClassVar[bool]
    """Whether the error of an encoding is added to the next values of the tensor."""

    @abstractmethod
    def size(self, length: int) -> int:
        """The bytes of `length` encoded values."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> None:
        """Encode float32 values into `size(len(values))` bytes of dtype uint8."""

    @abstractmethod
    def decode(self, encoded: Tensor, out: Tensor) -> None:
        """Decode bytes of `encode` into float32 values."""


class BFloat16(Codec):
    """The values rounded to bfloat16: half of the bytes, and 8 bits of precision."""

    has_feedback: ClassVar[bool] = False

    def size(self, length: int) -> int:
        return 2 * length

    def encode(self, values: Tensor, out: Tensor) -> None:
        out.view(torch.bfloat16).copy_(values)

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        out.copy_(encoded.view(torch.bfloat16))


class BlockInt8(Codec):
    """8-bit integers with a scale for each block: 0.254 of the bytes.

    The largest magnitude of a block becomes 127, so that the error of a value is at
    most 1/254 of it. A block with a NaN or an infinite value is decoded to NaNs.

    The format is that of Dettmers et al., "8-bit optimizers via block-wise
    quantization", ICLR 2022, with a linear map.
    """

    has_feedback: ClassVar[bool] = True
    BLOCK: ClassVar[int] = 256
    """Values that share a scale."""
    _LARGEST: ClassVar[int] = 127

    def size(self, length: int) -> int:
        return self._scale_bytes(length) + length

    def encode(self, values: Tensor, out: Tensor) -> None:
        scales, integers = self._parts(out, len(values))
        whole = len(values) // self.BLOCK * self.BLOCK
        for part, begin, end in (
            (values[:whole].view(-1, self.BLOCK), 0, whole),
            (values[whole:].view(1, -1), whole, len(values)),
        ):
            if begin == end:
                continue
            first = begin // self.BLOCK
            scale = scales[first : first + len(part)]
            torch.amax(part.abs(), dim=1, out=scale)
            scale.div_(self._LARGEST)
            # A block of zeros has the scale 0, by which its values cannot be divided.
            divisor = scale.masked_fill(scale == 0, 1.0)
            scaled = part.div(divisor[:, None]).round_().nan_to_num_(0.0)
            integers[begin:end].copy_(scaled.view(-1))

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        scales, integers = self._parts(encoded, len(out))
        out.copy_(integers)
        whole = len(out) // self.BLOCK
        blocks = out[: whole * self.BLOCK].view(-1, self.BLOCK)
        blocks.mul_(scales[:whole, None])
        if len(scales) > whole:
            out[whole * self.BLOCK :].mul_(scales[whole])

    def _scale_bytes(self, length: int) -> int:
        return 4 * -(-length // self.BLOCK)

    def _parts(self, encoded: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The scales and the integers in encoded bytes."""
        at = self._scale_bytes(length)
        return encoded[:at].view(torch.float32), encoded[at:].view(torch.int8)


CODECS: dict[str, Codec] = {"bf16": BFloat16(), "int8": BlockInt8()}


def codec_of(name: str) -> Codec:
    """The codec with a name.

    Raises:
        UsageError: There is none.
    """
    if name not in CODECS:
        known = ", ".join(map(repr, CODECS))
        raise UsageError(f"compression {name!r}: expected one of {known}")
    return CODECS[name]
